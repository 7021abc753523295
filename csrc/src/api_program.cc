// The C interface of recorded programs. The caller owns the buffers, which must not move. Arguments of an operation are
// checked when it is added, the number of rows when it runs.
#include <algorithm>
#include <string>

#include "error.h"
#include "handles.h"
#include "program.h"

struct proa_program {
    proa_program(std::shared_ptr<proa::Host> host, int sequences, int pages, int64_t most)
        : program(std::move(host), sequences, pages), most_rows(most) {}
    proa::Program program;
    int64_t most_rows;
};

namespace {

using proa::Error;
using proa::require;

proa::ConstRows rows_in(const void* data, int64_t stride, int64_t width) {
    require(data, "An operand is a null pointer.");
    if (stride < width)
        throw Error(PROA_ERROR_ARGUMENT, "The stride of an operand is " + std::to_string(stride) +
                                             " values, but its rows have " + std::to_string(width) + ".");
    return {static_cast<const uint16_t*>(data), stride};
}

proa::Rows rows_out(void* data, int64_t stride, int64_t width) {
    rows_in(data, stride, width);
    return {static_cast<uint16_t*>(data), stride};
}

// Checks the program, then adds the operation that `make` returns.
template <class Make>
int add(proa_program* program, Make&& make) {
    return proa::guarded([&] {
        require(program, "The program is a null pointer.");
        program->program.add(make());
    });
}

void check_width(int64_t value, const char* what) {
    if (value < 1 || value > 1 << 24)
        throw Error(PROA_ERROR_ARGUMENT, std::string(what) + " must be 1 to 2^24, not " + std::to_string(value) + ".");
}

proa::KvPages kv_pages(const proa_kv_pages* c) {
    require(c && c->keys && c->values, "The cache, or its keys or values, is a null pointer.");
    check_width(c->pages, "The number of pages"), check_width(c->page_tokens, "The number of tokens per page");
    check_width(c->kv_heads, "The number of KV heads"), check_width(c->head_dim, "The dimension of a head");
    const int64_t stride = c->kv_heads * c->head_dim;
    return {c->keys,          c->values,
            stride,           stride,
            int(c->pages),    int(c->page_tokens),
            int(c->kv_heads), int(c->head_dim),
            int(c->head_dim), proa::KvType(c->type),
            c->key_scale,     c->value_scale};
}

proa::KvPages latent_pages(const proa_latent_pages* c, int64_t key_dim, int64_t value_first, int64_t value_dim) {
    require(c && c->rows, "The cache or its rows are a null pointer.");
    check_width(c->pages, "The number of pages"), check_width(c->page_tokens, "The number of tokens per page");
    check_width(c->latent, "The dimension of a latent"), check_width(c->key, "The dimension of a rotary key");
    uint16_t* rows = static_cast<uint16_t*>(c->rows);
    const int64_t stride = c->latent + c->key;
    return {rows, rows + value_first, stride,        stride, int(c->pages), int(c->page_tokens),
            1,    int(key_dim),       int(value_dim)};
}

}  // namespace

extern "C" {

int proa_program_create(proa_pool* pool, int64_t most_rows, int64_t most_sequences, int64_t most_pages,
                        proa_program** out) {
    return proa::guarded([&] {
        require(pool && out, "An argument is a null pointer.");
        require(most_rows >= 1 && most_rows <= 1 << 20, "A program must have 1 to 2^20 rows.");
        require(most_sequences >= 1 && most_sequences <= 1 << 20 && most_pages >= 1 && most_pages <= 1 << 24,
                "A program must have 1 to 2^20 sequences of 1 to 2^24 pages.");
        *out = new proa_program(pool->owner, int(most_sequences), int(most_pages), most_rows);
    });
}

int proa_program_destroy(proa_program* program) {
    return proa::guarded([&] { delete program; });
}

int proa_program_size(const proa_program* program, int64_t* out) {
    return proa::guarded([&] {
        require(program && out, "An argument is a null pointer.");
        *out = int64_t(program->program.size());
    });
}

int proa_program_set_batch(proa_program* program, int64_t sequences, const int32_t* q_lens, const int32_t* kv_lens,
                           const int32_t* states, const int32_t* page_table, int64_t table_stride, int64_t pages,
                           int64_t page_tokens) {
    return proa::guarded([&] {
        require(program && q_lens && kv_lens && page_table, "An argument is a null pointer.");
        program->program.batch.set(int(sequences), q_lens, kv_lens, page_table, table_stride, int(pages),
                                   int(page_tokens), states);
    });
}

int proa_program_set_regime(proa_program* program, int32_t regime) {
    return proa::guarded([&] {
        require(program, "The program is a null pointer.");
        require(regime >= 0 && regime < proa::kRegimes, "The regime must be one of PROA_REGIME_*.");
        program->program.batch.set_regime(proa::Regime(regime));
    });
}

int proa_program_run(proa_program* program, int64_t first, int64_t end, int64_t rows, int lane) {
    return proa::guarded([&] {
        require(program, "The program is a null pointer.");
        require(first >= 0 && first <= end && end <= int64_t(program->program.size()),
                "The range of operations is outside of the program.");
        require_lane(program->program.host(), lane);
        if (rows < 0 || rows > program->most_rows)
            throw Error(PROA_ERROR_ARGUMENT, "The program's buffers are for " + std::to_string(program->most_rows) +
                                                 " rows, not " + std::to_string(rows) + ".");
        if (rows) program->program.run(size_t(first), size_t(end), int(rows), lane);
    });
}

int proa_program_add_embed(proa_program* program, const int64_t* tokens, const void* table, int64_t vocabulary,
                           int64_t width, void* out, int64_t out_stride) {
    return add(program, [&] {
        require(tokens && table, "An operand is a null pointer.");
        check_width(width, "The width"), check_width(vocabulary, "The size of the vocabulary");
        return proa::Embed{tokens, static_cast<const uint16_t*>(table), vocabulary, int(width),
                           rows_out(out, out_stride, width)};
    });
}

int proa_program_add_lookup(proa_program* program, const proa_matrix* table, const int64_t* tokens, void* out,
                            int64_t out_stride) {
    return add(program, [&] {
        require(table && tokens, "An operand is a null pointer.");
        return proa::Lookup{&table->matrix, tokens, rows_out(out, out_stride, table->matrix.layout.columns)};
    });
}

int proa_program_add_rms_norm(proa_program* program, const void* x, int64_t x_stride, const void* weight,
                              int64_t groups, int64_t width, float eps, void* out, int64_t out_stride, float offset,
                              int64_t apart) {
    return add(program, [&] {
        check_width(groups, "The number of groups"), check_width(width, "The width");
        require(apart >= 0 && apart < 1 << 24, "The distance between groups must be 0 to 2^24 - 1.");
        require(weight, "The norm's weight is a null pointer.");
        const int64_t all = groups * width;
        return proa::RmsNorm{rows_in(x, x_stride, all),
                             static_cast<const uint16_t*>(weight),
                             int(groups),
                             int(width),
                             eps,
                             rows_out(out, out_stride, all),
                             offset,
                             int(apart)};
    });
}

int proa_program_add_add(proa_program* program, void* x, int64_t x_stride, const void* y, int64_t y_stride,
                         int64_t width) {
    return add(program, [&] {
        check_width(width, "The width");
        return proa::Add{rows_out(x, x_stride, width), rows_in(y, y_stride, width), int(width)};
    });
}

int proa_program_add_gated_add(proa_program* program, void* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                               const void* y, int64_t y_stride, int64_t width) {
    return add(program, [&] {
        check_width(width, "The width");
        const proa::Rows out = rows_out(x, x_stride, width);
        return proa::GatedAdd{out, rows_in(gate, gate_stride, 1), rows_in(y, y_stride, width), int(width), out};
    });
}

int proa_program_add_gate(proa_program* program, void* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                          int64_t heads, int64_t head_dim, int64_t apart) {
    return add(program, [&] {
        check_width(heads, "The number of heads"), check_width(head_dim, "The dimension of a head"),
            check_width(apart, "The distance between gates");
        return proa::Gate{rows_out(x, x_stride, heads * head_dim), rows_in(gate, gate_stride, 1), int(heads),
                          int(head_dim), int(apart)};
    });
}

int proa_program_add_rotary(proa_program* program, void* x, int64_t x_stride, const float* cos, const float* sin,
                            int64_t heads, int64_t head_dim, int64_t half, int interleaved) {
    return add(program, [&] {
        check_width(heads, "The number of heads"), check_width(head_dim, "The dimension of a head"),
            check_width(half, "Half of the rotary dimensions");
        require(cos && sin && 2 * half <= head_dim,
                "cos or sin is a null pointer, or there are more rotary dimensions than the head has.");
        return proa::Rotary{
            rows_out(x, x_stride, heads * head_dim), cos, sin, int(heads), int(head_dim), int(half), interleaved != 0};
    });
}

int proa_program_add_route(proa_program* program, const void* logits, int64_t stride, int wide,
                           const proa_router_rule* rule, int32_t* ids, float* weights) {
    return add(program, [&] {
        require(rule, "The rule is a null pointer.");
        rows_in(logits, stride, rule->experts);
        return proa::Route{logits, stride, wide != 0, *rule, ids, weights};
    });
}

int proa_program_add_best(proa_program* program, const float* logits, int64_t stride, int64_t width, int32_t* ids) {
    return add(program, [&] {
        check_width(width, "The number of logits");
        return proa::Argmax{logits, stride, int(width), ids};
    });
}

int proa_program_add_write_kv(proa_program* program, const proa_kv_pages* cache, const void* keys, int64_t keys_stride,
                              const void* values, int64_t values_stride, const int64_t* slots) {
    return add(program, [&] {
        const proa::KvPages pages = kv_pages(cache);
        require(slots, "The slots are a null pointer.");
        return proa::WriteKv{rows_in(keys, keys_stride, pages.key_stride),
                             rows_in(values, values_stride, pages.value_stride), slots, pages};
    });
}

int proa_program_add_attention(proa_program* program, const proa_kv_pages* cache, const void* q, int64_t q_stride,
                               void* out, int64_t out_stride, int64_t heads, int64_t window, float scale,
                               const float* sinks) {
    return add(program, [&] {
        const proa::KvPages pages = kv_pages(cache);
        check_width(heads, "The number of heads");
        require(heads % pages.kv_heads == 0, "The number of heads must be a multiple of the number of KV heads.");
        require(window >= 0, "The window must not be negative.");
        return proa::Attention{rows_in(q, q_stride, heads * pages.key_dim),
                               rows_out(out, out_stride, heads * pages.value_dim),
                               pages,
                               &program->program.batch,
                               int(heads),
                               int(window),
                               scale,
                               sinks};
    });
}

int proa_program_add_write_latent(proa_program* program, const proa_latent_pages* cache, const void* latents,
                                  int64_t latents_stride, const void* keys, int64_t keys_stride, const int64_t* slots) {
    return add(program, [&] {
        require(cache, "The cache is a null pointer.");
        const proa::KvPages pages = latent_pages(cache, cache->latent, cache->latent, cache->key);
        require(slots, "The slots are a null pointer.");
        return proa::WriteKv{rows_in(latents, latents_stride, cache->latent), rows_in(keys, keys_stride, cache->key),
                             slots, pages};
    });
}

int proa_program_add_latent_attention(proa_program* program, const proa_latent_pages* cache, const void* q,
                                      int64_t q_stride, void* out, int64_t out_stride, int64_t heads, float scale) {
    return add(program, [&] {
        require(cache, "The cache is a null pointer.");
        const proa::KvPages pages = latent_pages(cache, cache->latent + cache->key, 0, cache->latent);
        check_width(heads, "The number of heads");
        return proa::Attention{rows_in(q, q_stride, heads * pages.key_dim),
                               rows_out(out, out_stride, heads * pages.value_dim),
                               pages,
                               &program->program.batch,
                               int(heads),
                               0,
                               scale,
                               nullptr};
    });
}

int proa_program_add_gated_delta(proa_program* program, const proa_gated_delta* d) {
    return add(program, [&] {
        require(d, "The description of the delta rule is a null pointer.");
        for (const int64_t size : {d->groups, d->per_group, d->key_dim, d->value_dim, d->taps, d->group_stride,
                                   d->gates_group_stride, d->slots})
            check_width(size, "Each size of the delta rule");
        const auto rows = [&](const void* data) { return rows_in(data, d->row_stride, 1); };
        const auto gates = [&](const void* data) { return rows_in(data, d->gates_row_stride, 1); };
        const proa::DeltaShape shape{int(d->groups), int(d->per_group), int(d->key_dim), int(d->value_dim),
                                     int(d->taps)};
        return proa::GatedDelta{shape,
                                rows(d->q),
                                rows(d->k),
                                rows(d->v),
                                rows(d->z),
                                int(d->group_stride),
                                gates(d->b),
                                gates(d->a),
                                int(d->gates_group_stride),
                                d->conv,
                                d->a_log,
                                d->dt_bias,
                                static_cast<const uint16_t*>(d->norm),
                                d->eps,
                                d->rule,
                                static_cast<uint16_t*>(d->tail),
                                int(d->slots),
                                &program->program.batch,
                                d->mixed,
                                rows_out(d->out, d->out_stride, 1)};
    });
}

int proa_program_add_linear(proa_program* program, const proa_matrix* weights, int64_t outputs, const float* bias,
                            const void* x, int64_t x_stride, void* y, int64_t y_stride, int wide) {
    return add(program, [&] {
        require(weights, "The matrix is a null pointer.");
        const proa::Matrix& m = weights->matrix;
        require(outputs >= 1 && outputs <= m.layout.rows,
                "The number of outputs must be between 1 and the rows of the matrix.");
        rows_in(y, y_stride, outputs);
        const proa::ConstRows from = rows_in(x, x_stride, m.layout.columns);
        return proa::Linear{&m, int(outputs), bias, from.data, from.stride, y, y_stride, wide != 0};
    });
}

int proa_program_add_head_linear(proa_program* program, const proa_matrix* weights, int64_t carried, const void* x,
                                 int64_t x_stride, int64_t x_apart, void* y, int64_t y_stride, int64_t y_apart) {
    return add(program, [&] {
        require(weights, "The matrix is a null pointer.");
        const proa::ConstRows from = rows_in(x, x_stride, 1);
        const proa::Rows to = rows_out(y, y_stride, 1);
        return proa::HeadLinear{&weights->matrix, int(std::clamp<int64_t>(carried, -1, 1 << 20)),
                                from.data,        from.stride,
                                x_apart,          to.data,
                                to.stride,        y_apart};
    });
}

int proa_program_add_moe(proa_program* program, const proa_experts* experts, int64_t top_k, const int32_t* ids,
                         const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride) {
    return add(program, [&] {
        require(experts, "The experts are a null pointer.");
        const proa::Experts& e = experts->experts;
        require(top_k >= 0 && top_k <= 1024 && (top_k ? ids && weights : e.gate_up->count == 1),
                "top_k must be 1 to 1024, with ids and weights, or 0, with a single expert.");
        const proa::ConstRows from = rows_in(x, x_stride, e.gate_up->layout.columns);
        rows_in(y, y_stride, e.down->layout.rows);
        return proa::Moe{&e, int(top_k), ids, weights, from.data, from.stride, y, y_stride, false};
    });
}

}  // extern "C"
