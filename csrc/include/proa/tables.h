// The tables of Proa's native library: what formats, stored types and limits there are. A part of proa/native.h, which
// states the rules for its functions. A function that returns a table sets a pointer to a static array; row_bytes is
// the size of a row in the caller's header, and an error unless the library's rows have the same.

#ifndef PROA_TABLES_H
#define PROA_TABLES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PROA_ANY_GROUP (-1)  // 0 (all columns), or a multiple of 16
#define PROA_NO_FORMAT (-1)

// A format of packed weights; its number is its index. The table is csrc/src/formats.h.
typedef struct proa_format_info {
    const char *name, *label;         // label: of the form with the usual group
    const char *code, *scale;         // types of the quantised values and of their scales
    int32_t group;                    // columns that share a scale; 0: no scales; or PROA_ANY_GROUP
    int32_t usual_group;              // one that checkpoints have
    int32_t code_bits;                // of a code in a panel
    int32_t unit_values, unit_words;  // a row's codes lie in units of `unit_values` codes in `unit_words` 32-bit words
    int32_t has_min;                  // a weight is code * scale + minimum
    int32_t integers;                 // codes are small integers (or multiples of a half)
    int32_t block_groups;             // groups that share a second-level scale; 1: there is none
    int32_t scale_bytes, block_scale_bytes,
        tail_bytes;  // of 16 rows: per group, per block of groups, once; with minimums
} proa_format_info;
PROA_API int proa_get_formats(const proa_format_info** rows, int64_t* count, int64_t row_bytes);

// A type in which checkpoints store weights. The table is csrc/src/stored.cc.
typedef struct proa_stored_info {
    const char* name;
    int32_t type;  // ggml's number; from 1000 on, types that ggml does not have
    int32_t block_values, block_bytes;
    int32_t format, group;  // the packed format that holds its blocks without rounding, or PROA_NO_FORMAT
} proa_stored_info;
PROA_API int proa_get_stored_types(const proa_stored_info** rows, int64_t* count, int64_t row_bytes);

// Constants of the library that its callers must use as well.
typedef struct proa_limit {
    const char* name;
    int32_t value;
} proa_limit;
PROA_API int proa_get_limits(const proa_limit** rows, int64_t* count, int64_t row_bytes);

// The kernels that an instruction set has for a format, by the number of rows (PROA_REGIME_BY_ROWS): integer products
// of digits up to digit_rows, matrix tiles from tile_rows on, weights expanded once for all rows from wide_rows on,
// pairs of columns else. 0: it has none of that kind.
typedef struct proa_format_kernels {
    int32_t digit_rows, tile_rows, wide_rows;
} proa_format_kernels;
// isa: the name of any instruction set that the library was built for, whether or not this CPU has it.
PROA_API int proa_get_format_kernels(const char* isa, int format, proa_format_kernels* out);

#ifdef __cplusplus
}
#endif

#endif  // PROA_TABLES_H
