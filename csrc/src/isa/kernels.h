// The kernels of one instruction set, as a table. Belongs here: signatures and shapes. Never: arithmetic, threads.
#pragma once

#include "../layout.h"

namespace proa {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3 };

// Rows of bfloat16 packed for one layout's width (see block_begin): pairs [padded / 2][M], sums [padded / 16][M] of each
// block.
struct Packed {
    void* pairs;
    float* sums;  // null where the format has no minimums
    int tokens;
    int block_tokens;
};

struct Kernels {
    const char* name;
    int pair_bytes;  // of a packed pair of activations

    // Tokens of a block that `tokens` rows are packed by for this format. Whoever packs and whoever multiplies agree by it.
    int (*block_tokens)(Format format, int tokens);

    // Pack tokens [first, last) of x: row index[t], or t where index is null, of `stride` values.
    void (*pack)(const uint16_t* x, size_t stride, const int32_t* index, int first, int last, int columns, int padded,
                 const Packed& out);

    // out [panels][tokens][16] = panels of w times x. scratch: expand_bytes(layout, panels) or null where that is 0.
    void (*matmul)(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, void* scratch);
    size_t (*expand_bytes)(const Layout& l, int panels, int tokens);

    // Columns [16 first, 16 end) of out = activation of sums [2 (end - first)][tokens][16], where gate and up panels
    // alternate (only gates for kRelu2). bias: float32 in the panels' order, from panel 0, or null. padded: of out.
    void (*activate)(Activation kind, float limit, const float* sums, const float* bias, int first, int end, int padded,
                     const Packed& out);
    // Zero columns [first, padded) of out; first is a multiple of 16.
    void (*clear_columns)(int first, int padded, const Packed& out);

    // total [panels][total_tokens][16] at tokens index[t] += weights[t] * (part [panels][tokens][16] + bias).
    void (*accumulate)(const float* part, int panels, int tokens, const int32_t* index, const float* weights,
                       const float* bias, float* total, int total_tokens);
    // Row t of out (bfloat16, or float32 if wide) = the first `columns` of sums [panels][tokens][16] + bias.
    void (*store_rows)(const float* sums, int panels, int tokens, const float* bias, int columns, bool wide, void* out,
                       size_t stride);
};

// Null where the library was not built for this instruction set.
extern const Kernels* const kScalarKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;
extern const Kernels* const kAmxKernels;

}  // namespace proa
