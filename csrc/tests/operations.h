// Shared by the tests of operations: every instruction set that this CPU can run, pools, random rows, derived bounds.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "error.h"
#include "host.h"
#include "select.h"

namespace testing {

constexpr double kEps32 = 1.1920928955078125e-7;
constexpr double kRound16 = 1. / 256;  // largest relative error of rounding to bfloat16

inline float value(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}
// Decodes e4m3: sign, four bits of exponent (bias 7), three of fraction; NaN if all seven are set.
inline float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8.f + float(fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    return code & 128 ? -size : size;
}
inline uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The error of storing `want` as bfloat16, with subnormals flushed.
inline double stored(double want) { return std::abs(want) * kRound16 * 1.01 + 2e-38; }

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    float normal() { return normal_(engine_); }
    int below(int end) { return int(engine_() % unsigned(end)); }
    std::vector<uint16_t> rows(size_t count, float size = 1) {
        std::vector<uint16_t> out(count);
        for (uint16_t& x : out) x = rounded(normal() * size);
        return out;
    }
    std::vector<float> floats(size_t count, float size = 1) {
        std::vector<float> out(count);
        for (float& x : out) x = normal() * size;
        return out;
    }

  private:
    std::mt19937 engine_;
    std::normal_distribution<float> normal_;
};

// Pools of one thread, of four threads on one node, and of four threads on three nodes.
inline proa::PoolOptions pool_options(int kind) {
    proa::PoolOptions options;
    options.pin = false;
    options.spin_us = 50;
    options.lanes = 2;
#ifdef __SANITIZE_THREAD__
    // A repeated task may read inputs that have been replaced since; its result is dropped. That is formally a data
    // race, so repeating is left to the test of the pool, whose tasks use atomics.
    options.redo = false;
#endif
    if (kind == 0) options.teams = {{}};
    if (kind == 1) options.teams = {{0, 0, 0}};
    if (kind == 2) options.teams = {{}, {0}, {0, 0}};
    return options;
}
#ifdef PROA_SANITIZED
constexpr int kPools[] = {0, 2};  // without workers, and with several nodes
#else
constexpr int kPools[] = {0, 1, 2};
#endif

#ifdef __SANITIZE_THREAD__
constexpr const char* kIsas[] = {"scalar-tiles"};  // threading does not depend on the instruction set
#else
constexpr const char* kIsas[] = {"scalar", "scalar-tiles", "avx2", "avx512", "avx512-bf16", "amx"};
#endif

// Runs an operation once and settles, so that no late worker reads it.
template <class Op>
void run_once(const Op& op, proa::Host& host, int rows, int lane = 0) {
    run(op, host, rows, lane);
    host.pool.settle();
}

// Calls `compute` with every available instruction set and every pool, on which its result must not depend; `judge`
// then checks one result of each instruction set.
template <class Compute, class Judge>
void on_everything(Compute&& compute, Judge&& judge) {
    for (const char* name : kIsas) {
        const proa::Kernels* kernels = nullptr;
        try {
            kernels = proa::select_kernels(name).kernels;
        } catch (const proa::Error&) {
            continue;  // this CPU lacks the instruction set
        }
        std::vector<uint16_t> first;
        for (int kind : kPools) {
            proa::Host host(pool_options(kind), kernels);
            std::vector<uint16_t> got = compute(host);
            host.pool.settle();
            if (kind == 0) {
                judge(got);
                first = std::move(got);
            } else {
                CHECK(got == first);
            }
        }
    }
}
// on_everything for a `compute` that checks its own result.
template <class Compute>
void on_everything(Compute&& compute) {
    on_everything(compute, [](const std::vector<uint16_t>&) {});
}

// True if the error is within the bound; prints it if not.
inline bool within(double got, double want, double bound) {
    if (std::abs(got - want) <= bound) return true;
    std::fprintf(stderr, "got %.9g, want %.9g, off by %.3g > %.3g\n", got, want, got - want, bound);
    return false;
}

}  // namespace testing
