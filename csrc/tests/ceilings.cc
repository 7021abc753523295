// The ceilings: all threads take part, none reads outside of its range, and every measurement ends.

#include "ceilings.h"

#include <vector>

#include "check.h"
#include "select.h"

namespace {

proa::Host two_threads() {
    return proa::Host({.teams = {{0}, {}}, .pin = false, .spin_us = 50, .redo = true},
                      proa::select_kernels("").kernels);
}

void reading_stays_within_the_spans() {
    proa::Host host = two_threads();
    const std::vector<uint8_t> memory((2 << 20) + 1000);  // the rest of a chunk is not read
    CHECK(proa::read_rate(host, {{memory.data(), memory.size()}}, 2, 0.05) > 0);
    CHECK(proa::read_rate(host, {{memory.data(), memory.size()}, {memory.data(), memory.size()}}, 1, 0.05) > 0);
}

void every_kernel_has_a_peak() {
    proa::Host host = two_threads();
    CHECK(proa::peak_rate(host, 1, 0.05) > 0);
    CHECK(proa::peak_rate(host, 2, 0.05) > 0);
}

void meetings_end() {
    proa::Host host = two_threads();
    CHECK(proa::dispatch_seconds(host, 100, false) > 0);
    CHECK(proa::dispatch_seconds(host, 10, true) > 0);
}

}  // namespace

int main() {
    reading_stays_within_the_spans();
    every_kernel_has_a_peak();
    meetings_end();
    return 0;
}
