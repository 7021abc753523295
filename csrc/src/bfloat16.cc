#include "bfloat16.h"

#include <algorithm>
#include <bit>

namespace proa {
namespace {

// The loops are written once and compiled for two instruction sets. No branches, so that they are vectorised.
#define PROA_LOOP [[gnu::always_inline]] inline

PROA_LOOP uint16_t rounded(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t up = bits + 0x7fff + (bits >> 16 & 1);
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up >> 16);
}

PROA_LOOP void round_all(const float* from, size_t values, uint16_t* to) {
    for (size_t i = 0; i < values; ++i) to[i] = rounded(from[i]);
}

PROA_LOOP void scale_one(uint16_t* values, int count, float scale, float factor, float minimum) {
    for (int i = 0; i < count; ++i)
        values[i] = rounded(std::bit_cast<float>(uint32_t(values[i]) << 16) * scale * factor + minimum);
}

PROA_LOOP void scale_all(uint16_t* values, int count, int group, const float* scales, const float* minimums,
                         float factor) {
    for (int k = 0; k < count; k += group)
        scale_one(values + k, std::min(group, count - k), *scales++, factor, *minimums++);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void round_by_eights(const float* from, size_t values, uint16_t* to) {
    round_all(from, values, to);
}

__attribute__((target("avx2"))) void scale_by_eights(uint16_t* values, int count, int group, const float* scales,
                                                     const float* minimums, float factor) {
    scale_all(values, count, group, scales, minimums, factor);
}

bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}
#endif

}  // namespace

void round_to_bf16_plainly(const float* from, size_t values, uint16_t* to) { round_all(from, values, to); }

void scale_bf16_plainly(uint16_t* values, int count, int group, const float* scales, const float* minimums,
                        float factor) {
    scale_all(values, count, group, scales, minimums, factor);
}

void round_to_bf16(const float* from, size_t values, uint16_t* to) {
#if defined(__x86_64__)
    if (has_avx2()) return round_by_eights(from, values, to);
#endif
    round_to_bf16_plainly(from, values, to);
}

void scale_bf16(uint16_t* values, int count, int group, const float* scales, const float* minimums, float factor) {
#if defined(__x86_64__)
    if (has_avx2()) return scale_by_eights(values, count, group, scales, minimums, factor);
#endif
    scale_bf16_plainly(values, count, group, scales, minimums, factor);
}

}  // namespace proa
