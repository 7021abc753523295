// Quantised values (codes) of a checkpoint whose scales are separate tensors: FP8, compressed-tensors, GPTQ, AWQ,
// NVFP4, MXFP4. Belongs here: packing them into panels, dequantising. Never: files.
#pragma once

#include "pack.h"
#include "stored.h"

namespace proa {

// How a matrix is stored. In a transposed order, a stored row holds values of one column of the matrix; codes are then
// in 32-bit words.
enum class Order : int32_t {
    kRows = 0,
    kPlainTransposed = 1,  // unquantised types: stored rows are the target's columns
    kWordsTransposed = 2,  // GPTQ: a word packs consecutive columns of one row
    kAwqTransposed = 3,    // AWQ: a word packs eight rows of one column, in the order of kPlaces
};

// A matrix's scales in memory.
struct Scales {
    Stored type;          // F32, F16, BF16, e4m3 or e8m0
    const uint8_t* data;  // one row of scales per `rows` rows of the matrix
    size_t stride;        // bytes from row to row, 0: a single row
    int rows;
    int64_t first;                      // matrix row at which the codes begin
    int group;                          // columns that share a scale, 0: all
    const uint8_t* mins;                // laid out like data, added to code * scale; null: none
    float factor;                       // scale of the whole matrix
    const int32_t* group_of = nullptr;  // group of each column; null: columns are sorted by group
};

constexpr bool is_coded(Stored type) { return int32_t(type) >= int32_t(Stored::kE4m3); }

// True if a layout holds such codes with such scales exactly.
bool keeps(const Layout& l, Stored type, const Scales& scales);

// Packs `rows` rows of codes, the first of which is row `first` of a job, like pack_rows. Returns whether the codes are
// finite; scales are not checked.
bool pack_coded(const Layout& l, Stored type, const Scales& scales, int first, const uint8_t* codes, size_t stride,
                int rows, int step, uint8_t* out);

// Dequantises row `row` of a job to float32: code * scale * factor + minimum, each operation rounded at most once.
void coded_to_float(Stored type, const Scales& scales, int row, const uint8_t* codes, int columns, float* to);

// coded_to_float, rounded once to bfloat16.
void coded_to_bf16(Stored type, const Scales& scales, int row, const uint8_t* codes, int columns, uint16_t* to);

// Number of stored rows of transposed codes with `columns` columns; bytes of each for `rows` rows of the target.
int transposed_rows(Stored type, Order order, int columns);
size_t transposed_bytes(Order order, int rows);

// Transposes a rectangle of transposed codes to contiguous rows of codes. Columns and rows are whole words.
void transpose(Stored type, Order order, const uint8_t* stored, size_t stride, int rows, int columns, uint8_t* to);

}  // namespace proa
