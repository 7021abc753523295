// The C interface of the operations on rows and of attention.

#include <algorithm>

#include "attention.h"
#include "error.h"
#include "handles.h"
#include "rows.h"

namespace {

constexpr int64_t kMostRows = 1 << 20;

uint16_t* bf16(void* p) { return static_cast<uint16_t*>(p); }
const uint16_t* bf16(const void* p) { return static_cast<const uint16_t*>(p); }

// Sizes of the operations are ints; whatever is no int must not look like a small one.
int size(int64_t value) { return int(std::clamp<int64_t>(value, -1, INT32_MAX)); }

// Checks and runs what `make` makes, and lets go of the caller's memory.
template <class Make>
int run_now(proa_pool* pool, int64_t rows, int lane, Make&& make) {
    return proa::guarded([&] {
        proa::require(pool, "The pool is a null pointer.");
        proa::require(rows >= 0 && rows <= kMostRows, "A step has 0 to 2^20 rows.");
        proa::require(lane >= 0 && lane < proa::kLanes, "There are lanes 0 and 1.");
        if (rows == 0) return;
        const auto op = make();
        check(op);
        const struct Settle {  // before the operation goes, however it ends
            proa::Pool& pool;
            ~Settle() { pool.settle(); }
        } settle{pool->host.pool};
        proa::run(op, pool->host, int(rows), lane);
    });
}

proa::KvPages pages_of(const proa_kv_pages* cache) {
    proa::require(cache, "The KV cache is a null pointer.");
    const proa_kv_pages& c = *cache;
    const int heads = size(c.kv_heads), dim = size(c.head_dim);
    const int64_t stride = int64_t(heads) * dim;
    return {bf16(c.keys), bf16(c.values), stride, stride, size(c.pages), size(c.page_tokens), heads, dim, dim};
}

proa::AttentionBatch batch_of(const proa_batch* batch, const proa::KvPages& cache) {
    proa::require(batch && batch->q_lens && batch->kv_lens && batch->page_table, "The batch has a null pointer.");
    proa::require(batch->sequences >= 0 && batch->sequences <= kMostRows, "A batch has 0 to 2^20 sequences.");
    proa::require(batch->table_stride >= 0 && batch->table_stride <= INT32_MAX, "The page table is too wide.");
    int64_t most = 1;
    for (int64_t s = 0; s < batch->sequences; ++s)
        most = std::max(most, (batch->kv_lens[s] + int64_t(cache.page_tokens) - 1) / cache.page_tokens);
    proa::require(most <= std::max<int64_t>(1, batch->table_stride), "The page table has too few columns.");
    proa::AttentionBatch made(int(batch->sequences), int(most));
    made.set(int(batch->sequences), batch->q_lens, batch->kv_lens, batch->page_table, batch->table_stride, cache.pages,
             cache.page_tokens);
    return made;
}

}  // namespace

extern "C" {

int proa_embed(proa_pool* pool, const int64_t* tokens, const void* table, int64_t vocabulary, int64_t width, void* out,
               int64_t out_stride, int64_t rows, int lane) {
    return run_now(pool, rows, lane,
                   [&] { return proa::Embed{tokens, bf16(table), vocabulary, size(width), {bf16(out), out_stride}}; });
}

int proa_rms_norm(proa_pool* pool, void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                  const void* weight, int64_t groups, int64_t width, float eps, void* out, int64_t out_stride,
                  int64_t rows, int lane) {
    return run_now(pool, rows, lane, [&] {
        return proa::RmsNorm{
            {bf16(x), x_stride},    {bf16(residual), residual_stride}, bf16(weight), size(groups), size(width), eps,
            {bf16(out), out_stride}};
    });
}

int proa_add(proa_pool* pool, void* x, int64_t x_stride, const void* y, int64_t y_stride, int64_t width, int64_t rows,
             int lane) {
    return run_now(pool, rows, lane, [&] { return proa::Add{{bf16(x), x_stride}, {bf16(y), y_stride}, size(width)}; });
}

int proa_gated_add(proa_pool* pool, const void* routed, int64_t routed_stride, const void* gate, int64_t gate_stride,
                   const void* shared, int64_t shared_stride, int64_t width, void* out, int64_t out_stride,
                   int64_t rows, int lane) {
    return run_now(pool, rows, lane, [&] {
        return proa::GatedAdd{{bf16(routed), routed_stride},
                              {bf16(gate), gate_stride},
                              {bf16(shared), shared_stride},
                              size(width),
                              {bf16(out), out_stride}};
    });
}

int proa_rotary(proa_pool* pool, void* x, int64_t x_stride, int64_t heads, int64_t head_dim, const float* cos,
                const float* sin, int64_t half, int interleaved, int64_t rows, int lane) {
    return run_now(pool, rows, lane, [&] {
        return proa::Rotary{{bf16(x), x_stride}, cos, sin, size(heads), size(head_dim), size(half), interleaved != 0};
    });
}

int proa_route(proa_pool* pool, const void* logits, int64_t stride, int wide, int64_t experts, int64_t top_k,
               int renormalise, int32_t* ids, float* weights, int64_t rows, int lane) {
    return run_now(pool, rows, lane, [&] {
        return proa::Route{logits, stride, wide != 0, size(experts), size(top_k), renormalise != 0, ids, weights};
    });
}

int proa_write_kv(proa_pool* pool, const void* keys, int64_t key_stride, const void* values, int64_t value_stride,
                  const int64_t* slots, const proa_kv_pages* cache, int64_t rows, int lane) {
    return run_now(pool, rows, lane, [&] {
        return proa::WriteKv{{bf16(keys), key_stride}, {bf16(values), value_stride}, slots, pages_of(cache)};
    });
}

int proa_attention(proa_pool* pool, const void* q, int64_t q_stride, const proa_kv_pages* cache,
                   const proa_batch* batch, int64_t heads, int64_t window, float scale, const float* sinks, void* out,
                   int64_t out_stride, int64_t rows, int lane) {
    return proa::guarded([&] {
        const proa::KvPages pages = pages_of(cache);
        proa::check(pages);
        const proa::AttentionBatch made = batch_of(batch, pages);
        const int code = run_now(pool, rows, lane, [&] {
            return proa::Attention{
                {bf16(q), q_stride}, {bf16(out), out_stride}, pages, &made, size(heads), size(window), scale, sinks};
        });
        if (code != PROA_OK) throw proa::Error(code, proa_last_error());
    });
}

}  // extern "C"
