// What the kernels of attention are given. See kernels/attention.h for what they do with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

constexpr int kMostHeadDim = 576;  // the latent of MLA with its rotary part
constexpr int kAttendTokens = 32;  // of a block that attend() takes
constexpr int kAttendAhead = 16;   // tokens after it that may be fetched

constexpr int attention_lines(int dim) { return (dim + 31) / 32; }
constexpr int attention_state_floats(int value_dim) { return 16 + 32 * attention_lines(value_dim); }

// Up to kAttendTokens keys, and for each of the KV heads, which lie next to each other, some rows of queries.
struct AttendBlock {
    const uint16_t* const* keys;  // [kAttendTokens + kAttendAhead] valid pointers, even if there are fewer tokens
    const uint16_t* const* values;
    int ahead;  // tokens from the one that is worked on to the one that is fetched meanwhile: at most kAttendAhead
    int tokens, heads, rows, key_dim, value_dim;  // rows: of each head
    const float* queries;                         // [heads][rows] of pack_query
    const int *first, *last;                      // [rows] the tokens of the block that a row sees
    float scale;
    float* scores;  // [heads][rows][kAttendTokens], for the kernel's own use
    float* states;  // [heads][rows]
};

// Scores [panels][rows][16] of a tile of keys; maxima and sums are those of the tiles before, then those of all so far.
struct SoftmaxTile {
    float* scores;  // become weights
    int panels, rows;
    const int *first, *last;  // [rows]
    float scale;
    float *maxima, *sums, *factors;  // [rows]; factors: what results of the tiles before are to be multiplied with
};

}  // namespace proa
