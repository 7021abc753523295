// Operations on rows of bfloat16: embedding, norms, additions, rotary angles, writing the KV cache, choosing experts
// and tokens.
// Belongs here: what they are given. Never: matrices.
//
// An operation lives as long as its pool may be working on it: until the program that holds it is gone, or settle().
#pragma once

#include "host.h"
#include "late.h"

namespace proa {

// Where rows lie. `stride`: values from one row to the next, so that a part of wider rows is a view of them.
struct ConstRows {
    const uint16_t* data;
    int64_t stride;
};
struct Rows {
    uint16_t* data;
    int64_t stride;
    operator ConstRows() const { return {data, stride}; }
};

// What a run leaves for its tasks.
struct RowsNow {
    Late<const Kernels*> kernels;
    Late<int> rows;
};

// out[t] = table[tokens[t]]. Throws Error for an id outside of the vocabulary.
struct Embed {
    const int64_t* tokens;
    const uint16_t* table;  // [vocabulary][width]
    int64_t vocabulary;
    int width;
    Rows out;
    RowsNow now{};
};

// Every group of every row: out = x / rms(x) * (offset + weight [width]). With a residual, x += residual comes first
// and is kept. out may be x.
struct RmsNorm {
    Rows x;              // only read unless there is a residual
    ConstRows residual;  // null data: none
    const uint16_t* weight;
    int groups, width;  // groups of the output's row lie next to each other
    float eps;
    Rows out;
    float offset = 0;
    int apart = 0;  // values from group to group of x's row, if they are more than the width; then without a residual
    RowsNow now{};
};

// x *= sigmoid(gate), head by head.
struct Gate {
    Rows x;          // rows of [heads][head_dim]
    ConstRows gate;  // likewise, but `apart` values from head to head
    int heads, head_dim, apart;
    RowsNow now{};
};

// x += y.
struct Add {
    Rows x;
    ConstRows y;
    int width;
    RowsNow now{};
};

// out = routed + sigmoid(gate[t][0]) * shared; out may be either of them.
struct GatedAdd {
    ConstRows routed, gate, shared;
    int width;
    Rows out;
    RowsNow now{};
};

// The first 2 * half values of each head are turned, in place.
struct Rotary {
    Rows x;                  // rows of [heads][head_dim]
    const float *cos, *sin;  // [rows][half]
    int heads, head_dim, half;
    bool interleaved;
    RowsNow now{};
};

enum class KvType : int32_t { kBf16 = 0, kE4m3 = 1 };

// The KV cache of a layer. A token's heads lie next to each other.
struct KvPages {
    void *keys, *values;               // [pages][page_tokens] rows
    int64_t key_stride, value_stride;  // values from token to token
    int pages, page_tokens, kv_heads, key_dim, value_dim;
    KvType type = KvType::kBf16;
    float key_scale = 1, value_scale = 1;  // of e4m3: what a stored value is multiplied with

    int elem_bytes() const { return type == KvType::kBf16 ? 2 : 1; }
};

// Keys and values of the rows go to their slots: page * page_tokens + offset. Throws Error for a slot outside of it.
struct WriteKv {
    ConstRows keys, values;
    const int64_t* slots;
    KvPages cache;
    RowsNow now{};
};

// The experts that a rule chooses by the logits, best first.
struct Route {
    const void* logits;  // bfloat16 rows, float32 if wide
    int64_t stride;
    bool wide;
    RouterRule rule;
    int32_t* ids;    // [rows][top_k]
    float* weights;  // [rows][top_k]
    RowsNow now{};
};

// Of each row of logits the largest value's id, of equal ones the lowest; -1 where a value is infinite or no number.
struct Best {
    const float* logits;
    int64_t stride;
    int width;
    int32_t* ids;  // [rows]
    RowsNow now{};
};

// Throw Error for null pointers, sizes below one, and rows that overlap. Done once, where an operation comes from
// outside.
void check(const Embed& op);
void check(const RmsNorm& op);
void check(const Add& op);
void check(const GatedAdd& op);
void check(const Gate& op);
void check(const Rotary& op);
void check(const KvPages& cache);
void check(const WriteKv& op);
void check(const Route& op);
void check(const Best& op);
void check_rows(const void* data, int64_t stride, int64_t width, const char* what);

void run(const Embed& op, Host& host, int rows, int lane);
void run(const RmsNorm& op, Host& host, int rows, int lane);
void run(const Add& op, Host& host, int rows, int lane);
void run(const GatedAdd& op, Host& host, int rows, int lane);
void run(const Gate& op, Host& host, int rows, int lane);
void run(const Rotary& op, Host& host, int rows, int lane);
void run(const WriteKv& op, Host& host, int rows, int lane);
void run(const Route& op, Host& host, int rows, int lane);
void run(const Best& op, Host& host, int rows, int lane);

}  // namespace proa
