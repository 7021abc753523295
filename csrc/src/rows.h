// Operations on rows of bfloat16: embedding, norms, additions, rotary, writing the KV cache, routing, argmax. Belongs
// here: their arguments. Never: matrices.
//
// An operation must live until settle(), or until its program is destroyed: late workers may still read it.
#pragma once

#include "host.h"
#include "late.h"

namespace proa {

// A view of rows. stride: elements from one row to the next, so that a part of wider rows can be a view.
struct ConstRows {
    const uint16_t* data;
    int64_t stride;
};
struct Rows {
    uint16_t* data;
    int64_t stride;
    operator ConstRows() const { return {data, stride}; }
};

// Arguments of a run for its tasks.
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

// For every group of every row: out = x / rms(x) * (offset + weight [width]). out may be x.
struct RmsNorm {
    ConstRows x;
    const uint16_t* weight;
    int groups, width;  // groups of an output row are contiguous
    float eps;
    Rows out;
    float offset = 0;
    int apart = 0;  // elements between groups of x's row if more than the width
    RowsNow now{};
};

// x *= sigmoid(gate), head by head.
struct Gate {
    Rows x;          // rows of [heads][head_dim]
    ConstRows gate;  // likewise, heads start `apart` elements apart
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

// Rotates the first 2 * half values of each head, in place.
struct Rotary {
    Rows x;                  // rows of [heads][head_dim]
    const float *cos, *sin;  // [rows][half]
    int heads, head_dim, half;
    bool interleaved;
    RowsNow now{};
};

enum class KvType : int32_t { kBf16 = 0, kE4m3 = 1 };

// The KV cache of a layer. A token's heads are contiguous.
struct KvPages {
    void *keys, *values;               // [pages][page_tokens] rows
    int64_t key_stride, value_stride;  // elements from token to token
    int pages, page_tokens, kv_heads, key_dim, value_dim;
    KvType type = KvType::kBf16;
    float key_scale = 1, value_scale = 1;  // e4m3 only: K = stored value * key_scale, V likewise

    int elem_bytes() const { return type == KvType::kBf16 ? 2 : 1; }
};

// Writes keys and values of the rows to their slots: page * page_tokens + offset. Throws Error for a slot out of range.
struct WriteKv {
    ConstRows keys, values;
    const int64_t* slots;
    KvPages cache;
    RowsNow now{};
};

// Routing: the experts that a rule chooses from the logits, highest score first.
struct Route {
    const void* logits;  // bfloat16 rows, float32 if wide
    int64_t stride;
    bool wide;
    RouterRule rule;
    int32_t* ids;    // [rows][top_k]
    float* weights;  // [rows][top_k]
    RowsNow now{};
};

// The argmax of each row of logits, the lowest id among equals; -1 for a row with a non-finite value.
struct Argmax {
    const float* logits;
    int64_t stride;
    int width;
    int32_t* ids;  // [rows]
    RowsNow now{};
};

// Throw Error for null pointers, sizes below one, and rows that overlap. Called once, when an operation is added.
void check(const Embed& op);
void check(const RmsNorm& op);
void check(const Add& op);
void check(const GatedAdd& op);
void check(const Gate& op);
void check(const Rotary& op);
void check(const KvPages& cache);
void check(const WriteKv& op);
void check(const Route& op);
void check(const Argmax& op);
void check_rows(const void* data, int64_t stride, int64_t width, const char* what);

void run(const Embed& op, Host& host, int rows, int lane);
void run(const RmsNorm& op, Host& host, int rows, int lane);
void run(const Add& op, Host& host, int rows, int lane);
void run(const GatedAdd& op, Host& host, int rows, int lane);
void run(const Gate& op, Host& host, int rows, int lane);
void run(const Rotary& op, Host& host, int rows, int lane);
void run(const WriteKv& op, Host& host, int rows, int lane);
void run(const Route& op, Host& host, int rows, int lane);
void run(const Argmax& op, Host& host, int rows, int lane);

}  // namespace proa
