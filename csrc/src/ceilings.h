// What this machine can do at best: reading memory, multiplying, starting the tasks of a phase. The figures that a
// benchmark measures beside its own. Never: what an operation takes.
#pragma once

#include <vector>

#include "host.h"

namespace proa {

struct Span {
    const uint8_t* data;
    size_t bytes;
};

double now_s();  // of a clock that only runs forward

// Bytes per second that `workers` threads of the pool read together for about `seconds`. They take chunk after chunk of
// 1 MB of their node's span; a node without one reads nothing. Each span must be larger than the caches.
double read_rate(Host& host, const std::vector<Span>& spans, int workers, double seconds);

// Floating-point operations per second of `workers` threads that multiply on registers alone.
double peak_rate(Host& host, int workers, double seconds);

// Seconds that a phase of one empty task for each thread takes, the mean of `phases` phases one after the other.
// `meet`: each task waits until every thread has one; else whoever is quick may do them all.
double dispatch_seconds(Host& host, int phases, bool meet);

}  // namespace proa
