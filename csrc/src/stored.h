// Types in which checkpoints store weights: unquantised types, GGUF's blocks, and codes with separate scales (coded.h).
// Belongs here: converting them to floats, exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "layout.h"

namespace proa {

// Values are ggml's type numbers; from 1000 on, types of codes and scales that ggml does not have.
enum class Stored : int32_t {
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ2K = 10,
    kQ3K = 11,
    kQ4K = 12,
    kQ5K = 13,
    kQ6K = 14,
    kIq4Nl = 20,
    kIq4Xs = 23,
    kF64 = 28,
    kBf16 = 30,
    kMxfp4 = 39,
    kE4m3 = 1000,
    kE8m0 = 1001,   // a power of two by its biased exponent; 2^-127 is taken as 0
    kInt8 = 1002,   // two's complement
    kUint8 = 1003,  // code - 128
    kInt4 = 1004,   // code - 8; two codes per byte, the first in the low bits
    kUint4 = 1005,  // code
    kE2m1 = 1006,
    kSigned4 = 1007,  // two's complement, otherwise as kInt4
};

// All types, as the C ABI describes them; the table is in stored.cc.
std::span<const proa_stored_info> stored_types();

struct StoredFacts {
    int block_values, block_bytes;
};

// Throws Error (argument) for an unknown type.
StoredFacts facts_of(Stored type);

// The packed format that holds the blocks of a type without rounding, and its group.
struct KeptFormat {
    Format format;
    int group;
};
// Throws Error (argument) if there is none.
KeptFormat kept_format(Stored type);

// Converts float16 to float32, exactly, even with flushing of subnormal float32.
float from_half(uint16_t half);

// Converts `values` values, whole blocks, to float32 with the operations of ggml's reference in the same order.
void to_float(Stored type, const uint8_t* from, size_t values, float* to);

// Converts stored values to bfloat16, rounded once.
void to_bf16(Stored type, const uint8_t* from, size_t values, uint16_t* to);

}  // namespace proa
