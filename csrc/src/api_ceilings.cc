// The C interface of the ceilings: checks arguments.
#include <vector>

#include "ceilings.h"
#include "error.h"
#include "handles.h"
#include "proa/native.h"

namespace {

using proa::require;

void check_measure(const proa_pool* pool, int workers, double seconds, const void* out) {
    require(pool && out, "An argument is a null pointer.");
    require(workers >= 1 && workers <= pool->host.pool.threads(),
            "The number of threads must be between 1 and that of the pool.");
    require(seconds > 0 && seconds <= 60, "A measurement must take more than 0 and at most 60 seconds.");
}

}  // namespace

extern "C" {

int proa_measure_read(proa_pool* pool, const void* const* data, const int64_t* bytes, int64_t spans, int workers,
                      double seconds, double* bytes_per_s) {
    return proa::guarded([&] {
        check_measure(pool, workers, seconds, bytes_per_s);
        require(data && bytes && spans >= 1 && spans <= pool->host.pool.nodes(),
                "There must be at least one range to read, and at most one range per team.");
        std::vector<proa::Span> all;
        for (int64_t i = 0; i < spans; ++i) {
            require(data[i] && bytes[i] >= 1 << 20, "A range to read must have at least 1 MiB.");
            all.push_back({static_cast<const uint8_t*>(data[i]), size_t(bytes[i])});
        }
        *bytes_per_s = proa::read_rate(pool->host, all, workers, seconds);
    });
}

int proa_measure_peak(proa_pool* pool, int workers, double seconds, double* flops_per_s) {
    return proa::guarded([&] {
        check_measure(pool, workers, seconds, flops_per_s);
        *flops_per_s = proa::peak_rate(pool->host, workers, seconds);
    });
}

int proa_measure_dispatch(proa_pool* pool, int phases, int meet, double* seconds_each) {
    return proa::guarded([&] {
        require(pool && seconds_each, "An argument is a null pointer.");
        require(phases >= 1 && phases <= 1 << 20, "There must be 1 to 2^20 phases.");
        *seconds_each = proa::dispatch_seconds(pool->host, phases, meet != 0);
    });
}

int proa_time_moe(proa_pool* pool, const proa_moe_trial* trial, int64_t first, int64_t calls, double* seconds) {
    return proa::guarded([&] {
        require(trial && trial->layers && trial->ids && trial->weights && seconds, "An argument is a null pointer.");
        require(trial->layer_count >= 1 && trial->routings >= 1,
                "A trial must have at least one layer and one routing.");
        require(first >= 0 && calls >= 0, "The first call and the number of calls must not be negative.");
        const int64_t choices = trial->tokens * trial->top_k;
        for (int64_t i = 0; i < calls; ++i) {
            const int64_t routing = (first + i) % trial->routings * choices;
            const double begin_s = proa::now_s();
            const int code = proa_moe(pool, trial->layers[(first + i) % trial->layer_count], trial->top_k,
                                      trial->ids + routing, trial->weights + routing, trial->x, trial->x_stride,
                                      trial->y, trial->y_stride, 0, trial->tokens, 0);
            seconds[i] = proa::now_s() - begin_s;
            if (code != PROA_OK) throw proa::Error(code, proa_last_error());
        }
    });
}

}  // extern "C"
