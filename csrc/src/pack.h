// Rows of a checkpoint -> panels. Belongs here: moving bits to where layout.h wants them. Never: rounding.
#pragma once

#include <vector>

#include "layout.h"
#include "stored.h"

namespace proa {

// Rows as a checkpoint has them, one code a byte (float16 and bfloat16: their two bytes). Strides in bytes; what a
// format does not have is null.
struct Source {
    const uint8_t* codes = nullptr;
    size_t code_stride = 0;
    const uint8_t* scales = nullptr;  // of each group, in the format's type
    size_t scale_stride = 0;
    int scale_rows = 1;                     // rows that share a row of scales: 1, or a multiple of 16 for kFp8Panel
    const uint8_t* mins = nullptr;          // like scales
    const uint8_t* block_scales = nullptr;  // Q4_K, Q5_K, Q6_K: float16 of each block
    const uint8_t* block_mins = nullptr;
    size_t block_stride = 0;
    float factor = 1.f;  // of the whole panel (nvfp4)
};

// Panels at out, out + step * panel_bytes, ... from `rows` rows (the last panel is filled up with zeros). Whether
// numbers of bfloat16 and float16 are finite; codes count as such. Throws Error (argument) for codes that the format
// does not have.
bool pack_rows(const Layout& l, const Source& source, int rows, int step, uint8_t* out);

// The same in two parts, of one panel. words: of each of `rows` rows one for each line of codes (words.h), `stride`
// bytes from row to row; rows of `source` from `first` on. put_lines returns the bits that are set in any of the words.
uint32_t put_lines(const Layout& l, const uint8_t* words, size_t stride, int rows, uint8_t* panel);
void put_scales(const Layout& l, const Source& source, int first, int rows, uint8_t* panel);

// Blocks of a checkpoint, row by row, as the format that keeps them exactly (kept_format in stored.h). Whether their
// scales and minimums are finite. Throws Error (argument) if the layout is not such a one.
bool pack_blocks(Stored type, const Layout& l, const uint8_t* blocks, size_t row_stride, int rows, int step,
                 uint8_t* out);

}  // namespace proa
