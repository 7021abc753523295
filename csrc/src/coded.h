// Codes of a checkpoint whose scales lie in tensors of their own: FP8, compressed-tensors, GPTQ, AWQ, NVFP4, MXFP4.
// Belongs here: codes with their scales -> panels, or numbers. Never: files.
#pragma once

#include "pack.h"
#include "stored.h"

namespace proa {

// How rows of codes lie. Turned ones are columns of what is stored, in words of 32 bits.
enum class Order : int32_t {
    kRows = 0,
    kPlainTurned = 1,  // of plain types: stored rows are the target's columns
    kWordsTurned = 2,  // GPTQ: a word has successive columns of one row, a stored row those of all rows
    kAwqTurned = 3,    // AWQ: a word has eight rows of one column, in the order of turn_awq
};

// A matrix's scales in memory.
struct Scales {
    Stored type;          // F32, F16, BF16, e4m3 or e8m0
    const uint8_t* data;  // a row for each `rows` rows of the matrix
    size_t stride;        // bytes from row to row, 0: there is one
    int rows;
    int64_t first;                      // row of the matrix that codes begin with
    int group;                          // columns that share a scale, 0: all
    const uint8_t* mins;                // like data; added to code * scale. Null: none
    float factor;                       // of all scales
    const int32_t* group_of = nullptr;  // of each column; null: columns are in the order of their groups
};

constexpr bool is_coded(Stored type) { return int32_t(type) >= int32_t(Stored::kE4m3); }

// Whether a layout keeps such codes with such scales, unrounded.
bool keeps(const Layout& l, Stored type, const Scales& scales);

// `rows` rows of codes, the first of which is row `first` of a job, as pack_rows does it. Whether the codes are finite;
// scales are not looked at.
bool pack_coded(const Layout& l, Stored type, const Scales& scales, int first, const uint8_t* codes, size_t stride,
                int rows, int step, uint8_t* out);

// Row `row` of a job as float32: code * scale, then times the factor, plus the minimum; each rounded at most once.
void coded_to_float(Stored type, const Scales& scales, int row, const uint8_t* codes, int columns, float* to);

// The same, rounded once to bfloat16.
void coded_to_bf16(Stored type, const Scales& scales, int row, const uint8_t* codes, int columns, uint16_t* to);

// Stored rows that a rectangle of turned codes has, and bytes of each for `rows` rows of the target.
int turned_rows(Stored type, Order order, int columns);
size_t turned_bytes(Order order, int rows);

// A rectangle of turned codes -> rows of codes, one after the other. Columns and rows are whole words.
void turn(Stored type, Order order, const uint8_t* stored, size_t stride, int rows, int columns, uint8_t* to);

}  // namespace proa
