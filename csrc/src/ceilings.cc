#include "ceilings.h"

#include <time.h>

#include <atomic>

namespace proa {

double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

namespace {

constexpr size_t kChunkBytes = 1 << 20;
constexpr int kMostWaits = 1 << 20;       // about a millisecond
constexpr int64_t kPeakRounds = 1 << 12;  // about 50 microseconds, as long as reading a chunk

// Lets workers repeat a step until the time is over. A task that starts late does little, so that sleeping or missing
// workers do not prolong the measurement.
template <class Step>
struct Race {
    const Step& step;  // (node) -> the amount of work done
    const Phase& phase;
    double end_s;
    mutable std::atomic<double> done{0};

    static void run(const void* context, int task, const std::byte*) {
        const Race& race = *static_cast<const Race*>(context);
        int node = 0;
        while (task >= race.phase.begin[node + 1]) ++node;
        double done = 0;
        while (now_s() < race.end_s) done += race.step(node);
        race.done.fetch_add(done, std::memory_order_relaxed);
    }
};

// Returns the rate of all workers together.
template <class Step>
double race(Pool& pool, int workers, double seconds, const Step& step) {
    Phase phase = published(workers, pool.nodes(), nullptr, Race<Step>::run);
    const double begin_s = now_s();
    Race<Step> all{step, phase, begin_s + seconds};
    phase.context = &all;
    pool.run(phase);
    return all.done.load() / (now_s() - begin_s);
}

// Tasks that wait for one another, for a bounded time: a worker may be preempted.
struct Meeting {
    int all;
    mutable std::atomic<int> here{0};

    static void run(const void* context, int, const std::byte*) {
        const Meeting& meeting = *static_cast<const Meeting*>(context);
        meeting.here.fetch_add(1, std::memory_order_relaxed);
        for (int i = 0; i < kMostWaits && meeting.here.load(std::memory_order_relaxed) < meeting.all; ++i) {
        }
    }
};

}  // namespace

double read_rate(Host& host, const std::vector<Span>& spans, int workers, double seconds) {
    struct alignas(64) Cursor {
        std::atomic<size_t> chunk{0};
    };
    std::vector<Cursor> cursors(spans.size());
    const auto read = [&](int node) -> double {
        if (size_t(node) >= spans.size() || spans[size_t(node)].bytes < kChunkBytes) return 0;
        const Span& span = spans[size_t(node)];
        const size_t chunks = span.bytes / kChunkBytes;
        const size_t chunk = cursors[size_t(node)].chunk.fetch_add(1, std::memory_order_relaxed) % chunks;
        uint32_t bits[16];
        host.kernels->read(span.data + chunk * kChunkBytes, kChunkBytes, bits);
        return kChunkBytes;
    };
    return race(host.pool, workers, seconds, read);
}

double peak_rate(Host& host, int workers, double seconds) {
    return race(host.pool, workers, seconds, [&](int) {
        float sums[16];
        return host.kernels->peak(kPeakRounds, 0.5f, sums);
    });
}

double dispatch_seconds(Host& host, int phases, bool meet) {
    const Meeting meeting{meet ? host.pool.threads() : 1};
    const Phase phase = published(host.pool.threads(), host.pool.nodes(), &meeting, Meeting::run);
    const double begin_s = now_s();
    for (int i = 0; i < phases; ++i) {
        meeting.here.store(0, std::memory_order_relaxed);
        host.pool.run(phase);
    }
    return (now_s() - begin_s) / phases;
}

}  // namespace proa
