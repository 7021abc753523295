// Arguments of the attention kernels; kernels/attention.h implements them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

constexpr int kMostHeadDim = 576;  // the latent of MLA with its rotary part
constexpr int kAttendTokens = 32;  // most tokens of a block of attend()
constexpr int kAttendAhead = 16;   // most tokens after it that may be prefetched

constexpr int attention_lines(int dim) { return (dim + 31) / 32; }
constexpr int attention_state_floats(int value_dim) { return 16 + 32 * attention_lines(value_dim); }

// Up to kAttendTokens keys of some contiguous KV heads, and some query rows for each head.
struct AttendBlock {
    const uint16_t* const* keys;  // [kAttendTokens + kAttendAhead] valid pointers, even if there are fewer tokens
    const uint16_t* const* values;
    int ahead;                                    // prefetch distance in tokens, at most kAttendAhead
    int tokens, heads, rows, key_dim, value_dim;  // rows: per head
    const float* queries;                         // [heads][rows], packed by pack_query
    const int *first, *last;                      // [rows]: range of the block's tokens that a row sees
    float scale;
    float* scores;  // workspace [heads][rows][kAttendTokens]
    float* states;  // [heads][rows]
};

// Scores [panels][rows][16] of a tile of keys; maxima and sums are updated from those of the previous tiles.
struct SoftmaxTile {
    float* scores;  // become weights
    int panels, rows;
    const int *first, *last;  // [rows]
    float scale;
    float *maxima, *sums, *factors;  // [rows]; factors: by which to multiply the results of the previous tiles
};

}  // namespace proa
