// The C interface of loading: checks arguments.
#include <cstdint>

#include "error.h"
#include "fill.h"
#include "handles.h"
#include "proa/native.h"

namespace {

using proa::require;

proa::Fill job_of(const proa_fill_job& j) {
    require(j.out && (j.fd >= 0 || j.from), "The source or the output of weights is a null pointer.");
    require(j.order >= 0 && j.order <= int(proa::Order::kAwqTransposed),
            "The order of stored rows must be one of Order in csrc/src/coded.h.");
    require(j.scale_stride >= 0 && j.scale_rows >= 0 && j.scale_rows <= 1 << 24 && j.scale_group >= 0 &&
                j.scale_group <= 1 << 20,
            "The stride, rows or group of scales are out of range.");
    require(j.fd >= -1 && j.stride >= 0 && j.step >= 1, "A descriptor, stride or step is out of range.");
    const bool plain = j.format == PROA_FILL_PLAIN;
    const proa::Layout l =
        proa::checked_layout(plain ? int(proa::Format::kBf16) : j.format, j.rows, j.columns, j.group);
    const size_t needed =
        plain ? size_t(j.rows) * size_t(j.columns) * 2 : (size_t(l.panels - 1) * size_t(j.step) + 1) * l.panel_bytes;
    require(j.out_bytes >= 0 && size_t(j.out_bytes) >= needed, "The output is too small.");
    return {
        j.fd,
        j.from,
        uint64_t(j.stride),
        proa::Stored(j.stored),
        proa::Order(j.order),
        plain,
        l,
        j.step,
        static_cast<uint8_t*>(j.out),
        j.team,
        {proa::Stored(j.scale_type), static_cast<const uint8_t*>(j.scales), size_t(j.scale_stride), int(j.scale_rows),
         j.scale_first, int(j.scale_group), static_cast<const uint8_t*>(j.mins), j.factor, j.group_of}};
}

}  // namespace

extern "C" {

int proa_fill(proa_pool* pool, const proa_fill_job* jobs, int64_t count, proa_fill_failure* failure) {
    return proa::guarded([&] {
        require(pool && failure && (jobs || !count), "An argument is a null pointer.");
        *failure = {-1, 0};
        std::vector<proa::Fill> all;
        for (int64_t i = 0; i < count; ++i) all.push_back(job_of(jobs[i]));
        try {
            proa::fill(pool->host.pool, all);
        } catch (const proa::ReadFailed& failed) {
            *failure = {failed.job, failed.error};
        } catch (const proa::NotFinite& failed) {
            *failure = {failed.job, PROA_FILL_NOT_FINITE};
        }
    });
}

int proa_decode(const proa_fill_job* job, float* to) {
    return proa::guarded([&] {
        require(job && to, "An argument is a null pointer.");
        proa::decode(job_of(*job), to);
    });
}

int proa_touch(proa_pool* pool, const int32_t* teams, proa_arena* const* arenas, const int64_t* firsts,
               const int64_t* counts, int64_t parts) {
    return proa::guarded([&] {
        require(pool && (!parts || (teams && arenas && firsts && counts)), "An argument is a null pointer.");
        std::vector<proa::Touch> spans;
        for (int64_t i = 0; i < parts; ++i) {
            require(firsts[i] >= 0 && counts[i] >= 0, "The start and length of an arena's range must not be negative.");
            spans.push_back({arenas[i], size_t(firsts[i]), size_t(counts[i]), teams[i]});
        }
        proa::touch(pool->host.pool, spans);
    });
}

int proa_to_float(int stored, const void* from, int64_t from_bytes, int64_t values, float* to) {
    return proa::guarded([&] {
        const proa::StoredFacts facts = proa::facts_of(proa::Stored(stored));
        require(from && to, "An argument is a null pointer.");
        require(values >= 0 && values % facts.block_values == 0, "Values must be whole blocks of the stored type.");
        require(from_bytes == values / facts.block_values * facts.block_bytes,
                "The number of bytes must be that of the values' blocks.");
        proa::to_float(proa::Stored(stored), static_cast<const uint8_t*>(from), size_t(values), to);
    });
}

}  // extern "C"
