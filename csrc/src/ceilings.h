// Limits of this machine, for benchmarks to compare with: memory bandwidth, FLOPS, dispatch of a phase's tasks. Never:
// the time of an operation.
#pragma once

#include <vector>

#include "host.h"

namespace proa {

struct Span {
    const uint8_t* data;
    size_t bytes;
};

double now_s();  // a monotonic clock

// Bytes per second that `workers` threads of the pool read together for about `seconds`. They take chunks of 1 MiB of
// their node's range; a node without a range reads nothing. Each range must be larger than the caches.
double read_rate(Host& host, const std::vector<Span>& spans, int workers, double seconds);

// Floating-point operations per second of `workers` threads that multiply on registers only.
double peak_rate(Host& host, int workers, double seconds);

// Mean seconds of a phase with one empty task per thread, over `phases` consecutive phases. meet: each task waits until
// every thread has one; else a fast thread may run them all.
double dispatch_seconds(Host& host, int phases, bool meet);

}  // namespace proa
