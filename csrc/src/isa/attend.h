// What the kernels of attention are given. See kernels/attention.h for what they do with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

constexpr int kMostHeadDim = 576;  // the latent of MLA with its rotary part
constexpr int kAttendTokens = 32;  // of a block that attend() takes

constexpr int attention_lines(int dim) { return (dim + 31) / 32; }
constexpr int attention_state_floats(int value_dim) { return 16 + 32 * attention_lines(value_dim); }

// The block that is read after this one, to be fetched meanwhile: `each` rows of a head for each token that is worked on,
// in the order in which they lie in memory, for that is what hardware prefetchers follow. The first is of `token`, `head`.
struct AttendNext {
    const uint16_t* const* keys;
    const uint16_t* const* values;
    int token, head, kv_heads, each;
};

// Rows of queries of one KV head and up to kAttendTokens keys. There are kAttendTokens valid pointers always.
struct AttendBlock {
    const uint16_t* const* keys;  // a pointer a token, to which the head's offset is added
    const uint16_t* const* values;
    size_t key_offset, value_offset;  // values
    AttendNext next;
    int tokens, rows, key_dim, value_dim;
    const float* queries;     // [rows] of pack_query
    const int *first, *last;  // [rows] the tokens of the block that a row sees
    float scale;
    float* states;  // [rows]
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
