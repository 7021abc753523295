// Linear attention by the gated delta rule: the causal convolution over q, k and v, the rule, the gated norm of what it
// gives (ops/table.py, GatedDelta). Belongs here: which part of it each task computes. Never: arithmetic.
#pragma once

#include <vector>

#include "attention.h"
#include "host.h"
#include "late.h"
#include "rows.h"

namespace proa {

constexpr int kMostTaps = 8;

// A row holds `groups` groups, each a key head with `per_group` value heads. Channels: all of q, all of k, all of v.
struct DeltaShape {
    int groups, per_group, key_dim, value_dim, taps;

    int heads() const { return groups * per_group; }
    int values() const { return per_group * value_dim; }  // of a group
    int group_channels() const { return 2 * key_dim + values(); }
    int channels() const { return groups * group_channels(); }
};

// A sequence's part of a run.
struct DeltaShare {
    int first_row, q_len, kv_len, slot;
};

struct GatedDelta {
    DeltaShape shape;
    ConstRows q, k, v, z;  // q, k: [groups][key_dim]; v, z: [groups][per_group][value_dim]; groups `apart` values apart
    int apart;
    ConstRows b, a;  // [groups][per_group], groups `gates_apart` values apart
    int gates_apart;
    const float* conv;             // [taps][channels], the oldest first
    const float *a_log, *dt_bias;  // [heads]
    const uint16_t* norm;          // [value_dim]
    float eps;
    float* rule;     // of each slot [heads][key_dim][value_dim]
    uint16_t* tail;  // of each slot [taps - 1][channels], the oldest first
    int slots;
    const AttentionBatch* batch;
    float* mixed;  // [rows * channels], written: q, k and v as the rule reads them
    Rows out;      // rows of [heads][value_dim]

    struct Now {
        Late<const Kernels*> kernels;
        Late<int> rows, sequences;
        mutable std::vector<DeltaShare> shares;  // as many as the batch may have sequences
    };
    Now now{};
};

void check(const GatedDelta& op);  // see rows.h

// A sequence whose first row is its first token begins with a state of zeros, whatever its slot holds.
void run(const GatedDelta& op, Host& host, int rows, int lane);

}  // namespace proa
