// Linear attention by the gated delta rule: the causal convolution over q, k and v, the recurrence, the gated norm of
// its output (ops/table.py, GatedDelta). Belongs here: splitting it into tasks. Never: arithmetic.
#pragma once

#include <vector>

#include "attention.h"
#include "host.h"
#include "late.h"
#include "rows.h"

namespace proa {

constexpr int kMostTaps = 8;

// A row has `groups` groups, each a key head with `per_group` value heads. Channels: all of q, all of k, all of v.
struct DeltaShape {
    int groups, per_group, key_dim, value_dim, taps;

    int heads() const { return groups * per_group; }
    int values() const { return per_group * value_dim; }  // values per group
    int group_channels() const { return 2 * key_dim + values(); }
    int channels() const { return groups * group_channels(); }
};

// One sequence's part of a run.
struct DeltaShare {
    int first_row, q_len, kv_len, slot;
};

struct GatedDelta {
    DeltaShape shape;
    ConstRows q, k, v,
        z;  // q, k: [groups][key_dim]; v, z: [groups][per_group][value_dim]; groups start `apart` elements apart
    int apart;
    ConstRows b, a;  // [groups][per_group], groups start `gates_apart` elements apart
    int gates_apart;
    const float* conv;             // [taps][channels], oldest tap first
    const float *a_log, *dt_bias;  // [heads]
    const uint16_t* norm;          // [value_dim]
    float eps;
    float* rule;     // per slot [heads][key_dim][value_dim]
    uint16_t* tail;  // per slot [taps - 1][channels], oldest row first
    int slots;
    const AttentionBatch* batch;
    float* mixed;  // workspace [rows * channels]: q, k and v after the convolution
    Rows out;      // rows of [heads][value_dim]

    struct Now {
        Late<const Kernels*> kernels;
        Late<int> rows, sequences;
        mutable std::vector<DeltaShare> shares;  // one per possible sequence of the batch
    };
    Now now{};
};

void check(const GatedDelta& op);  // see rows.h

// A sequence whose first row is its first token starts with a zero state, whatever its slot holds.
void run(const GatedDelta& op, Host& host, int rows, int lane);

}  // namespace proa
