// How checkpoints store numbers: plain types, and the blocks of GGUF. Belongs here: reading them as numbers, exactly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace proa {

// Values are ggml's type numbers.
enum class Stored : int32_t {
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ4K = 12,
    kQ5K = 13,
    kQ6K = 14,
    kF64 = 28,
    kBf16 = 30,
};

struct StoredFacts {
    int block_values, block_bytes;
};

// Throws Error (argument) for a number that is none of them.
StoredFacts facts_of(Stored type);

// A packed format that keeps the blocks of `type` without rounding, and its group.
struct KeptFormat {
    Format format;
    int group;
};
// Throws Error (argument) where there is none.
KeptFormat kept_format(Stored type);

// `values` numbers, whole blocks, with the operations of ggml's reference in the same order.
void to_float(Stored type, const uint8_t* from, size_t values, float* to);

// The same rounded once to bfloat16, to the nearest, ties to even.
void to_bf16(Stored type, const uint8_t* from, size_t values, uint16_t* to);

}  // namespace proa
