#include "fill.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.h"
#include "finite.h"

namespace proa {
namespace {

constexpr size_t kChunkBytes = 256 << 10;  // read at once: stays in a core's cache until it is packed
constexpr size_t kTransposedBytes =
    1 << 20;  // for transposed codes, which are read from as many places as there are columns
constexpr size_t kTouchBytes = 16 << 20;    // faulted by one task: whole pages of every size but the largest
constexpr int kInputUnit = 2 * kPanelRows;  // stored rows of a transposed task: 16 lines of every panel

// Tasks of one phase, grouped by team.
template <class Task>
class Tasks {
  public:
    Tasks(Pool& pool, void (*run)(const Task&, std::byte* scratch))
        : pool_(pool), run_(run), of_(size_t(pool.nodes())) {}

    void add(int team, const Task& task) { of_[size_t(team)].push_back(task); }

    void run(bool at_home) {
        Phase phase{};
        phase.nodes = pool_.nodes();
        for (const auto& team : of_) {
            all_.insert(all_.end(), team.begin(), team.end());
            phase.begin[&team - of_.data() + 1] = int(all_.size());
        }
        // publish() does the work, because it runs once per task, while run() may be repeated. The scratch belongs to
        // the worker that calls it, so the cast is safe.
        phase.at_home = at_home;
        phase.context = this;
        phase.publish = [](const void* context, int task, const std::byte* scratch) {
            auto& self = *static_cast<Tasks*>(const_cast<void*>(context));
            self.failure_.guard([&] { self.run_(self.all_[size_t(task)], const_cast<std::byte*>(scratch)); });
        };
        pool_.run(phase);
        failure_.rethrow();
    }

  private:
    Pool& pool_;
    void (*run_)(const Task&, std::byte* scratch);
    std::vector<std::vector<Task>> of_;
    std::vector<Task> all_;
    FirstFailure failure_;
};

// Stored rows [first, first + count) of a job.
struct Part {
    const Fill* job;
    int64_t index;  // of the job
    int first, count;
};

bool plain_transposed(const Fill& job) { return job.order == Order::kPlainTransposed; }
bool codes_transposed(const Fill& job) { return job.order > Order::kPlainTransposed; }

// Bytes of a row as it is processed: transposed codes are transposed back first.
size_t stored_bytes(const Fill& job) {
    const StoredFacts facts = facts_of(job.stored);
    const int values = plain_transposed(job) ? job.layout.rows : job.layout.columns;
    return size_t(values / facts.block_values) * size_t(facts.block_bytes);
}

void read_all(const Part& part, uint64_t at, uint8_t* to, size_t bytes) {
    while (bytes > 0) {
        const ssize_t got = pread(part.job->fd, to, bytes, off_t(at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw ReadFailed(part.index, got < 0 ? errno : 0);
        to += got, at += uint64_t(got), bytes -= size_t(got);
    }
}

struct StoredRows {
    const uint8_t* data;
    size_t stride;
};

// `count` runs of `bytes` bytes, a stride apart, in memory: in place, or read into `buffer`.
StoredRows read_rows(const Part& part, uint64_t at, int count, size_t bytes, uint8_t* buffer) {
    const Fill& job = *part.job;
    if (job.fd < 0) return {reinterpret_cast<const uint8_t*>(at), job.stride};
    if (bytes == job.stride) {
        read_all(part, at, buffer, bytes * size_t(count));
    } else {
        for (int r = 0; r < count; ++r)
            read_all(part, at + uint64_t(r) * job.stride, buffer + size_t(r) * bytes, bytes);
    }
    return {buffer, bytes};
}

// The part's rows in memory: in place, or read into `buffer`.
StoredRows fetch(const Part& part, uint8_t* buffer) {
    const Fill& job = *part.job;
    const size_t row = stored_bytes(job);
    if (!codes_transposed(job))
        return read_rows(part, job.from + uint64_t(part.first) * job.stride, part.count, row, buffer);
    uint8_t* rectangle = buffer + (size_t(part.count) * row + 63) / 64 * 64;
    const int runs = transposed_rows(job.stored, job.order, job.layout.columns);
    const StoredRows transposed = read_rows(part, job.from + transposed_bytes(job.order, part.first), runs,
                                            transposed_bytes(job.order, part.count), rectangle);
    transpose(job.stored, job.order, transposed.data, transposed.stride, part.count, job.layout.columns, buffer);
    return {buffer, row};
}

Source codes_at(StoredRows rows) {
    Source source;
    source.codes = rows.data, source.code_stride = rows.stride;
    return source;
}

void require_finite(const Part& part, bool finite) {
    if (!finite) throw NotFinite(part.index);
}

// True if the scales and minimums of the part's rows are finite.
bool finite_scales(const Part& part) {
    const Fill& job = *part.job;
    const Scales& s = job.scales;
    const int64_t first = s.stride ? (s.first + part.first) / s.rows : 0;
    const int64_t last = s.stride ? (s.first + part.first + part.count - 1) / s.rows : 0;
    const int group = s.group ? s.group : job.layout.columns;
    auto groups = size_t((job.layout.columns + group - 1) / group), rows = size_t(last - first) + 1;
    if (s.stride == groups * size_t(facts_of(s.type).block_bytes))
        groups *= rows, rows = 1;  // contiguous rows are tested as one
    for (size_t row = 0; row < rows; ++row)
        for (const uint8_t* of : {s.data, s.mins})
            if (of && !all_finite(s.type, of + (size_t(first) + row) * s.stride, groups)) return false;
    return true;
}

bool finite_bf16(const uint16_t* values, size_t count) {
    return all_finite(Stored::kBf16, reinterpret_cast<const uint8_t*>(values), count);
}

// Converts row `r` of the part to bfloat16, rounded once.
void row_to_bf16(const Part& part, StoredRows rows, int r, uint16_t* out) {
    const Fill& job = *part.job;
    const uint8_t* row = rows.data + size_t(r) * rows.stride;
    if (!is_coded(job.stored)) return to_bf16(job.stored, row, size_t(job.layout.columns), out);
    coded_to_bf16(job.stored, job.scales, part.first + r, row, job.layout.columns, out);
}

void fill_plain(const Part& part, StoredRows rows) {
    const Fill& job = *part.job;
    const auto columns = size_t(job.layout.columns);
    for (int r = 0; r < part.count; ++r) {
        auto* out = reinterpret_cast<uint16_t*>(job.out + size_t(part.first + r) * columns * 2);
        row_to_bf16(part, rows, r, out);
        require_finite(part, finite_bf16(out, columns));
    }
}

// `free`: scratch for a panel's rows in bfloat16.
void fill_panels(const Part& part, StoredRows rows, uint8_t* free) {
    const Fill& job = *part.job;
    const Layout& l = job.layout;
    const size_t narrow = size_t(l.columns) * 2;
    uint8_t* out = job.out + size_t(part.first / kPanelRows * job.step) * l.panel_bytes;
    if (l.format != Format::kBf16 && is_coded(job.stored)) {
        require_finite(part, finite_scales(part));
        return require_finite(
            part, pack_coded(l, job.stored, job.scales, part.first, rows.data, rows.stride, part.count, job.step, out));
    }
    if (l.format != Format::kBf16)
        return require_finite(part, pack_blocks(job.stored, l, rows.data, rows.stride, part.count, job.step, out));
    if (job.stored == Stored::kBf16)
        return require_finite(part, pack_rows(l, codes_at(rows), part.count, job.step, out));
    for (int first = 0; first < part.count; first += kPanelRows, out += size_t(job.step) * l.panel_bytes) {
        const int here = std::min(kPanelRows, part.count - first);
        for (int r = 0; r < here; ++r)
            row_to_bf16(part, rows, first + r, reinterpret_cast<uint16_t*>(free + size_t(r) * narrow));
        require_finite(part, pack_rows(l, codes_at({free, narrow}), here, job.step, out));
    }
}

// Two stored rows are a line of each panel: the values of columns k and k + 1 side by side for every row.
void fill_transposed(const Part& part, StoredRows rows, uint8_t* free) {
    const Fill& job = *part.job;
    const Layout& l = job.layout;
    const size_t padded = size_t(l.panels) * kPanelRows;
    auto* two = reinterpret_cast<uint16_t*>(free);
    std::memset(two, 0, 2 * padded * 2);
    const int end = part.first + part.count < l.columns ? part.first + part.count : l.padded;
    for (int k = part.first; k < end; k += 2) {
        for (int odd = 0; odd < 2; ++odd) {
            const int r = k + odd - part.first;
            uint16_t* row = two + size_t(odd) * padded;
            if (r < part.count)
                to_bf16(job.stored, rows.data + size_t(r) * rows.stride, size_t(l.rows), row);
            else
                std::memset(row, 0, size_t(l.rows) * 2);
            require_finite(part, finite_bf16(row, size_t(l.rows)));
        }
        for (int p = 0; p < l.panels; ++p) {
            uint16_t line[2 * kPanelRows];
            for (int i = 0; i < kPanelRows; ++i)
                line[2 * i] = two[p * kPanelRows + i], line[2 * i + 1] = two[padded + size_t(p * kPanelRows + i)];
            std::memcpy(job.out + size_t(p * job.step) * l.panel_bytes + size_t(k / 2) * kLineBytes, line, kLineBytes);
        }
    }
}

void fill_part(const Part& part, std::byte* scratch) {
    auto* buffer = reinterpret_cast<uint8_t*>(scratch);
    const StoredRows rows = fetch(part, buffer);
    uint8_t* free = buffer + (size_t(part.count) * stored_bytes(*part.job) + 63) / 64 * 64;
    if (part.job->plain) return fill_plain(part, rows);
    if (plain_transposed(*part.job)) return fill_transposed(part, rows, free);
    fill_panels(part, rows, free);
}

void check_codes(const Fill& job) {
    const Scales& s = job.scales;
    require(job.order != Order::kPlainTransposed, "Quantised types cannot have the transposed order of plain types.");
    require(s.data && s.rows >= 1 && s.first >= 0 && s.group >= 0, "Quantised types need scales.");
    if (!codes_transposed(job)) return;
    const int unit = facts_of(job.stored).block_values * 4;
    require(job.layout.columns % unit == 0 && (job.order == Order::kWordsTransposed || job.layout.rows % 8 == 0),
            "Transposed codes must be whole 32-bit words.");
}

void check(const Fill& job, int teams) {
    const StoredFacts facts = facts_of(job.stored);
    require(job.team >= 0 && job.team < teams, "A job's team does not exist in the pool.");
    require(!plain_transposed(job) || facts.block_values == 1, "A stored type with blocks cannot be transposed.");
    require(!plain_transposed(job) || !job.plain, "A transposed source cannot be written as plain rows.");
    const int values = plain_transposed(job) ? job.layout.rows : job.layout.columns;
    require(values % facts.block_values == 0, "Rows must be whole blocks of the stored type.");
    require(stored_bytes(job) <= kScratchBytes / kInputUnit / 8, "A stored row is too long for a worker's scratch.");
    require(job.stride >= (codes_transposed(job) ? transposed_bytes(job.order, job.layout.rows) : stored_bytes(job)),
            "Stored rows overlap: the stride is less than a row.");
    require(is_coded(job.stored) || !codes_transposed(job), "Only quantised types can be transposed by words.");
    if (is_coded(job.stored)) check_codes(job);
    if (job.plain || job.layout.format == Format::kBf16) return;
    if (is_coded(job.stored)) {
        require(keeps(job.layout, job.stored, job.scales), "This format cannot hold the stored type exactly.");
        return;
    }
    const KeptFormat kept = kept_format(job.stored);
    require(!plain_transposed(job) && job.layout.format == kept.format && job.layout.group == kept.group,
            "This format cannot hold the stored type exactly.");
}

}  // namespace

void fill(Pool& pool, const std::vector<Fill>& jobs) {
    Tasks<Part> tasks(pool, fill_part);
    for (const Fill& job : jobs) {
        check(job, pool.nodes());
        const int unit = plain_transposed(job) ? kInputUnit : kPanelRows;
        const int all = plain_transposed(job) ? job.layout.columns : job.layout.rows;
        const size_t chunk = codes_transposed(job) ? kTransposedBytes : kChunkBytes;
        const int step = std::max(1, int(chunk / stored_bytes(job)) / unit) * unit;
        for (int first = 0; first < all; first += step)
            tasks.add(job.team, {&job, &job - jobs.data(), first, std::min(step, all - first)});
    }
    tasks.run(false);
}

void decode(const Fill& job, float* to) {
    require(job.fd < 0 && is_coded(job.stored), "Only quantised types in memory can be dequantised.");
    check(job, 1);
    const Part part{&job, 0, 0, job.layout.rows};
    std::vector<uint8_t> buffer(codes_transposed(job) ? size_t(part.count) * stored_bytes(job) + 64 : 0);
    const StoredRows rows = fetch(part, buffer.data());
    for (int r = 0; r < part.count; ++r)
        coded_to_float(job.stored, job.scales, r, rows.data + size_t(r) * rows.stride, job.layout.columns,
                       to + size_t(r) * size_t(job.layout.columns));
}

void touch(Pool& pool, const std::vector<Touch>& spans) {
    Tasks<Touch> tasks(pool, [](const Touch& span, std::byte*) {
        if (const int code = proa_arena_touch(span.arena, span.first, span.count)) throw Error(code, proa_last_error());
    });
    for (Touch span : spans) {
        require(span.team >= 0 && span.team < pool.nodes(), "A range's team does not exist in the pool.");
        for (const size_t end = span.first + span.count; span.first < end; span.first += span.count) {
            span.count = std::min(end, (span.first / kTouchBytes + 1) * kTouchBytes) - span.first;
            tasks.add(span.team, span);
        }
    }
    tasks.run(true);
}

}  // namespace proa
