// Bytes of stored values for tests: random finite ones, and some with one non-finite value.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "operations.h"
#include "stored.h"

namespace testing {

constexpr std::array kPlainTypes{proa::Stored::kF32, proa::Stored::kF16, proa::Stored::kF64, proa::Stored::kBf16};
constexpr std::array kBlockTypes{proa::Stored::kQ4_0, proa::Stored::kQ4_1, proa::Stored::kQ5_0,  proa::Stored::kQ5_1,
                                 proa::Stored::kQ8_0, proa::Stored::kQ2K,  proa::Stored::kQ3K,   proa::Stored::kQ4K,
                                 proa::Stored::kQ5K,  proa::Stored::kQ6K,  proa::Stored::kIq4Nl, proa::Stored::kIq4Xs,
                                 proa::Stored::kMxfp4};

// Offsets, in a value or block, of the bytes that hold exponents of floats, the high bits first.
inline std::vector<size_t> exponent_bytes(proa::Stored type) {
    using proa::Stored;
    switch (type) {
        case Stored::kF32: return {3};
        case Stored::kF64: return {7};
        case Stored::kF16:
        case Stored::kBf16: return {1};
        case Stored::kE4m3:
        case Stored::kE8m0:
        case Stored::kMxfp4: return {0};
        case Stored::kQ4_1:
        case Stored::kQ5_1:
        case Stored::kQ4K:
        case Stored::kQ5K: return {1, 3};
        case Stored::kQ2K: return {81, 83};
        case Stored::kQ3K: return {109};
        case Stored::kQ6K: return {209};
        case Stored::kInt8:
        case Stored::kUint8:
        case Stored::kInt4:
        case Stored::kUint4:
        case Stored::kSigned4:
        case Stored::kE2m1: return {};
        default: return {1};
    }
}

inline std::vector<uint8_t> random_bytes(size_t count, unsigned seed) {
    Random random(seed);
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = uint8_t(random.below(256));
    return bytes;
}

// Random except for one bit of each exponent, so that all values are finite, also in bfloat16; small: below 2.
inline std::vector<uint8_t> finite_bytes(proa::Stored type, size_t values, unsigned seed, bool small = false) {
    const proa::StoredFacts facts = proa::facts_of(type);
    const uint8_t kept = small || type == proa::Stored::kF64 ? 0xbf : 0xfb;
    std::vector<uint8_t> bytes = random_bytes(values / size_t(facts.block_values) * size_t(facts.block_bytes), seed);
    for (size_t place : exponent_bytes(type))
        for (size_t at = place; at < bytes.size(); at += size_t(facts.block_bytes)) bytes[at] &= kept;
    return bytes;
}

// The bytes with NaN as the last value, or as the last block's scale.
inline std::vector<uint8_t> spoilt(proa::Stored type, std::vector<uint8_t> bytes) {
    const size_t last = bytes.size() - size_t(proa::facts_of(type).block_bytes) + exponent_bytes(type).back();
    bytes[last] = 0xff;
    if (type == proa::Stored::kBf16 || type == proa::Stored::kF32 || type == proa::Stored::kF64) bytes[last - 1] = 0xff;
    return bytes;
}

}  // namespace testing
