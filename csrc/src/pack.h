// Packs rows of a checkpoint into panels. Belongs here: moving bits to their places in layout.h. Never: rounding.
#pragma once

#include <vector>

#include "layout.h"
#include "stored.h"

namespace proa {

// Rows of a checkpoint, one code per byte (float16 and bfloat16: two bytes). Strides in bytes; parts that a format
// lacks are null.
struct Source {
    const uint8_t* codes = nullptr;
    size_t code_stride = 0;
    const uint8_t* scales = nullptr;  // one per group, in the format's type
    size_t scale_stride = 0;
    int scale_rows = 1;                     // rows that share a row of scales: 1, or a multiple of 16 for kFp8Panel
    const uint8_t* mins = nullptr;          // laid out like scales
    const uint8_t* block_scales = nullptr;  // Q4_K, Q5_K, Q6_K: one float16 per block
    const uint8_t* block_mins = nullptr;
    size_t block_stride = 0;
    float factor = 1.f;  // scale of the whole panel (nvfp4)
};

// Packs `rows` rows into panels at out, out + step * panel_bytes, ... (the last panel is padded with zeros). Returns
// whether bfloat16 and float16 values are finite; true for codes. Throws Error (argument) for codes that the format
// lacks.
bool pack_rows(const Layout& l, const Source& source, int rows, int step, uint8_t* out);

// pack_rows for one panel, in two parts. words: per row, one word for each line of codes (words.h), `stride` bytes from
// row to row; rows of `source` from `first` on. put_lines returns the bitwise or of all words.
uint32_t put_lines(const Layout& l, const uint8_t* words, size_t stride, int rows, uint8_t* panel);
void put_scales(const Layout& l, const Source& source, int first, int rows, uint8_t* panel);

// Packs GGUF blocks, row by row, into the format that holds them exactly (kept_format in stored.h). Returns whether
// their scales and minimums are finite. Throws Error (argument) if the layout has another format.
bool pack_blocks(Stored type, const Layout& l, const uint8_t* blocks, size_t row_stride, int rows, int step,
                 uint8_t* out);

}  // namespace proa
