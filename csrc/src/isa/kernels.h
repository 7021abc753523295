// The kernels of one instruction set, as a table. Belongs here: signatures and shapes. Never: arithmetic, threads.
#pragma once

#include "../layout.h"
#include "attend.h"
#include "proa/native.h"

namespace proa {

// Values of PROA_ACTIVATION_* in native.h. kNone is not part of the C ABI: attention packs its weights with it.
enum class Activation : int32_t {
    kSilu = PROA_ACTIVATION_SILU,
    kClampedSwiglu = PROA_ACTIVATION_CLAMPED_SWIGLU,
    kRelu2 = PROA_ACTIVATION_RELU2,
    kNone,
};
constexpr bool has_gate(Activation activation) { return activation < Activation::kRelu2; }

// How the kernel for a row is chosen. kByRows: the fastest for the number of rows. kDecode (fastest for one row) and
// kPrompt (fast for many rows) fix the kernel, so that a row has the same bits whatever other rows are computed with
// it: docs/decisions/040.
enum class Regime : int32_t { kByRows = 0, kDecode = 1, kPrompt = 2 };
constexpr int kRegimes = 3;

// How rows of bfloat16 are packed to be multiplied with some weights: as pairs of columns in blocks of tokens (see
// block_begin), as lines for matrix tiles, or as fixed-point digits for integer products (see kernels/digits.h).
struct Packing {
    enum Form : int32_t { kPairs, kTiles, kNibbleDigits, kByteDigits };
    int block_tokens;
    Form form;
    int zero;              // digits: added to codes, so that they are not negative
    float step;            // digits: value of one unit of a code
    bool sums = true;      // minimums are applied by sums of activations, not included in the weights
    bool wide = false;     // pairs: weights are expanded to bfloat16 panels once for all tokens (wide_panels.h)
    bool rounded = false;  // tiles: a weight times its group's scale is rounded to bfloat16 (tile_panels.h)
};

// Rows packed for one layout's width: pairs [padded / 2][M] or lines, sums [padded / 16][M] of each block.
struct Packed {
    void* pairs;
    float* sums;  // null if unused
    int tokens;
    Packing how;
};

constexpr int kMostExpertGroups = 64;

// Tokens per block with scaled weights. Kernels are compiled for each count and format, which takes long with a
// sanitizer; sanitizer builds get few counts, since the variants differ only in how many panels they process at once.
constexpr int most_scaled(int tokens) {
#ifdef PROA_SANITIZED
    return tokens < 3 ? tokens : 3;
#else
    return tokens;
#endif
}

using RouterRule = proa_router_rule;

constexpr int kTileTokens = 32;  // tokens per block for matrix tiles

// Blocking of work on many tokens: a task's weights and the activations of a group of tokens fit into a core's cache.
struct Blocking {
    size_t group_bytes;             // of a group's activations
    int least_tokens, most_tokens;  // per group; whole blocks
    int pass_tokens;
    int most_panels;      // per task
    size_t result_bytes;  // bound on intermediate results if experts are computed one by one: see moe_by_expert.cc

    int group_tokens(int padded) const {
        const int fit = int(group_bytes / size_t(2 * padded)) / kTileTokens * kTileTokens;
        return fit < least_tokens ? least_tokens : fit < most_tokens ? fit : most_tokens;
    }
};
constexpr Blocking kVectorBlocking = {512 << 10, 96, 384, 4096, 96, size_t(64) << 20};
constexpr Blocking kTileBlocking = {1536 << 10, 96, 384, 4096, 32, size_t(64) << 20};

// One token's update of some columns of a head's state [key_dim][columns]: `to` may be `from`. columns: a multiple of
// 16.
struct DeltaStep {
    const float* from;
    size_t from_stride;
    float* to;
    size_t to_stride;
    const float *key, *query;  // [key_dim]
    const float* value;        // [columns]
    float decay, beta;
    int key_dim, columns;
    float* out;  // [columns]
};

struct Kernels {
    const char* name;
    Blocking blocking;

    // The kinds of matmul that these kernels have for a format; see tables.h.
    proa_format_kernels (*format_kernels)(Format format);

    // How `tokens` rows are packed for these weights; used by both pack and matmul.
    Packing (*packing)(const Layout& l, int tokens);
    // Bytes of a packed row, for any number of rows.
    size_t (*row_bytes)(const Layout& l);

    // Pack tokens [first, last) of x: row index[t], or t where index is null, of `stride` values.
    void (*pack)(const uint16_t* x, size_t stride, const int32_t* index, int first, int last, int columns, int padded,
                 const Packed& out);

    // out [panels][tokens][16] = panels of w times x. scratch: expand_bytes(layout, tokens) bytes, or null if that is
    // 0. next: panels of this layout that the caller will multiply next, to prefetch; null if unknown.
    void (*matmul)(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, void* scratch,
                   const uint8_t* next);
    size_t (*expand_bytes)(const Layout& l, int tokens);

    // Expands one panel's weights to bfloat16's layout, rounded once: padded * 32 bytes.
    void (*expand)(const Layout& l, const uint8_t* w, void* out);

    // Columns [16 first, 16 end) of out = activation of sums [2 (end - first)][tokens][16], where gate and up panels
    // alternate; without has_gate sums [end - first][tokens][16], only up. bias: float32 in the panels' order, from
    // panel 0, or null. padded: columns of out.
    void (*activate)(Activation kind, float limit, const float* sums, const float* bias, int first, int end, int padded,
                     const Packed& out);
    // Zeroes columns [first, padded) of out; first is a multiple of 16.
    void (*clear_columns)(int first, int padded, const Packed& out);

    // total [panels][total_tokens][16] at tokens index[t] += weights[t] * (part [panels][tokens][16] + bias).
    void (*accumulate)(const float* part, int panels, int tokens, const int32_t* index, const float* weights,
                       const float* bias, float* total, int total_tokens);
    // out (bfloat16, or float32 if wide) [columns] = sum over i of weights[i] * row slots[i] of `rows`.
    void (*sum_rows)(const float* rows, size_t stride, const int32_t* slots, const float* weights, int count,
                     int columns, bool wide, void* out);
    // Row t of out (bfloat16, or float32 if wide) = the first `columns` of sums [panels][tokens][16] + bias.
    void (*store_rows)(const float* sums, int panels, int tokens, const float* bias, int columns, bool wide, void* out,
                       size_t stride);

    // Operations on one row of bfloat16, or one head of it; see kernels/rows.h. `out` may be an input.
    void (*rms_norm_row)(const uint16_t* x, const uint16_t* weight, int width, float eps, float offset, uint16_t* out);
    void (*add_row)(const uint16_t* x, const uint16_t* y, int width, uint16_t* out);
    void (*gated_add_row)(const uint16_t* routed, uint16_t gate, const uint16_t* shared, int width, uint16_t* out);
    void (*gate_row)(const uint16_t* x, const uint16_t* gate, int width, uint16_t* out);
    void (*rotate_head)(const uint16_t* x, const float* cos, const float* sin, int half, bool interleaved,
                        uint16_t* out);
    // Logits are bfloat16, or float32 if wide. keys: workspace of `experts` floats, rounded up to 16.
    void (*route_row)(const void* logits, bool wide, const RouterRule& rule, float* keys, int32_t* ids, float* weights);

    // Attention; see kernels/attention.h.
    int query_line;  // floats per 32 values of a packed query
    void (*pack_query)(const uint16_t* query, int dim, float* out);
    void (*attend)(const AttendBlock& block);
    void (*merge_states)(const float* parts, size_t stride, int count, int value_dim, float* state);
    void (*finish_state)(const float* state, float sink, float scale, int value_dim, uint16_t* out);
    void (*pack_keys)(const uint16_t* const* keys, size_t offset, int tokens, int dim, uint8_t* out);
    void (*pack_values)(const uint16_t* const* values, size_t offset, int tokens, int dim, int padded, uint8_t* out);
    void (*softmax_tile)(const SoftmaxTile& tile);
    void (*scale_and_add)(const float* part, const float* factors, int panels, int rows, float* total);

    // The e4m3 KV cache; see kernels/kv_codes.h.
    void (*to_e4m3)(const uint16_t* x, int count, float inverse, uint8_t* out);
    void (*from_e4m3)(const uint8_t* codes, int count, uint16_t* out);

    // The gated delta rule; see kernels/delta.h.
    void (*convolve)(const uint16_t* const* x, const float* taps, size_t stride, int count, int width, float* out);
    void (*scale_to)(float* x, int width, float length);
    void (*delta_step)(const DeltaStep& step);
    void (*gated_norm_row)(const float* x, const uint16_t* weight, const uint16_t* gate, int width, float eps,
                           uint16_t* out);

    // Ceilings, for benchmarks; see kernels/peak.h.
    double (*peak)(int64_t rounds, float seed, float* sums);
    void (*read)(const uint8_t* data, size_t bytes, uint32_t* bits);
};

// Each points to kRegimes tables, in the order of Regime.
extern const Kernels* const kScalarKernels;
extern const Kernels* const kScalarTilesKernels;
// x86-64 only.
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;
extern const Kernels* const kAmxKernels;

}  // namespace proa
