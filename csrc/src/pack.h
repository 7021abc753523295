// Rows of a checkpoint -> panels. Belongs here: moving bits to where layout.h wants them. Never: rounding.
#pragma once

#include <vector>

#include "layout.h"

namespace proa {

// Rows as a checkpoint has them, one code a byte (float16 and bfloat16: their two bytes). Strides in bytes; what a
// format does not have is null.
struct Source {
    const uint8_t* codes;
    size_t code_stride;
    const uint8_t* scales;  // of each group, in the format's type
    size_t scale_stride;
    int scale_rows;               // rows that share a row of scales: 1, or a multiple of 16 for kFp8Panel
    const uint8_t* mins;          // like scales
    const uint8_t* block_scales;  // Q4_K, Q6_K: float16 of each block
    const uint8_t* block_mins;
    size_t block_stride;
    float factor;  // of the whole panel (nvfp4)
};

// Panels at out, out + step * panel_bytes, ... from `rows` rows (the last panel is filled up with zeros). Throws Error
// (argument) for codes that the format does not have.
void pack_rows(const Layout& l, const Source& source, int rows, int step, uint8_t* out);

// Blocks of GGUF. Values are ggml's type numbers.
enum class GgufType : int32_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12, kQ6_K = 14 };

// The format that keeps such blocks exactly. Throws Error (argument) for another type.
Format format_of(GgufType type);
void pack_gguf(GgufType type, const Layout& l, const uint8_t* blocks, size_t row_stride, int rows, int step,
               uint8_t* out);

}  // namespace proa
