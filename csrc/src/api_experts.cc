// The C interface of the pool, packed matrices, linear layers and experts: checks arguments.
#include <sched.h>

#include <cstring>
#include <memory>
#include <string>

#include "error.h"
#include "handles.h"
#include "linear.h"
#include "pack.h"
#include "proa/native.h"
#include "select.h"

namespace {

using proa::Error;
using proa::require;

constexpr int64_t kMostTokens = 1 << 20;

std::vector<std::vector<int>> lists(const int32_t* cpus, const int32_t* begin, int32_t teams) {
    require(begin && begin[0] == 0, "The first team must begin at index 0 of the list of CPUs.");
    std::vector<std::vector<int>> all;
    for (int t = 0; t < teams; ++t) {
        require(begin[t + 1] >= begin[t], "Teams must be consecutive in the list of CPUs.");
        require(begin[t + 1] == begin[t] || cpus, "The list of CPUs is a null pointer.");
        all.emplace_back(cpus + begin[t], cpus + begin[t + 1]);
    }
    return all;
}

proa::PoolOptions pool_options(const proa_pool_options& o) {
    require(o.teams >= 1 && o.teams <= proa::kMaxNodes, "A pool must have 1 to 64 teams.");
    require(o.lanes >= 1, "A pool must have at least one lane.");
    proa::PoolOptions options;
    options.pin = o.pin, options.spin_us = o.spin_us, options.redo = o.redo, options.lanes = o.lanes;
    options.nice = o.nice;
    options.teams = lists(o.cpus, o.team_begin, o.teams);
    if (o.homes) options.homes = lists(o.homes, o.home_begin, o.teams);
    for (const auto& home : options.homes)
        for (int cpu : home) require(cpu >= 0 && cpu < CPU_SETSIZE, "Workers can be bound to CPUs 0 to 1023.");
    require(o.team_begin[o.teams] <= 4096, "A pool must have at most 4096 workers.");
    return options;
}

void check_rows(const void* rows, int64_t stride, int64_t columns, const char* what) {
    if (!rows) throw Error(PROA_ERROR_ARGUMENT, std::string("The pointer to ") + what + " is null.");
    if (stride < columns)
        throw Error(PROA_ERROR_ARGUMENT, std::string("The stride of ") + what + " is " + std::to_string(stride) +
                                             " values, but its rows have " + std::to_string(columns) + ".");
}

void check_call(const proa_pool* pool, int64_t tokens, int lane) {
    require(pool, "The pool is a null pointer.");
    require(tokens >= 0 && tokens <= kMostTokens, "A step must have 0 to 2^20 tokens.");
    require_lane(pool->host, lane);
}

void check_fit(const proa_pool* pool, const proa::Matrix& m) {
    require(int(m.slices.size()) <= pool->host.pool.nodes(), "The matrix has more slices than the pool has teams.");
}

}  // namespace

extern "C" {

int proa_select_isa(const char* wanted, char* name, char* reason, size_t bytes) {
    return proa::guarded([&] {
        require(name && reason && bytes > 0,
                "The buffers for the name and the reason must not be null pointers or empty.");
        const proa::Selected selected = proa::select_kernels(wanted ? wanted : "");
        std::strncpy(name, selected.kernels->name, bytes - 1), name[bytes - 1] = 0;
        std::strncpy(reason, selected.reason.c_str(), bytes - 1), reason[bytes - 1] = 0;
    });
}

int proa_pool_create(const proa_pool_options* options, proa_pool** out) {
    return proa::guarded([&] {
        require(options && out, "An argument is a null pointer.");
        const auto selected = proa::select_kernels(options->isa ? options->isa : "");
        auto host = std::make_shared<proa::Host>(pool_options(*options), selected.kernels);
        host->pool.check_bound();
        *out = new proa_pool{std::move(host)};
    });
}

int proa_pool_destroy(proa_pool* pool) {
    return proa::guarded([&] { delete pool; });
}

int proa_pool_use(proa_pool* pool, const int32_t* workers, int32_t teams) {
    return proa::guarded([&] {
        require(pool && workers && teams >= 0, "An argument is a null pointer.");
        pool->host.pool.use({workers, workers + teams});
    });
}

int proa_pool_redone(const proa_pool* pool, uint64_t* out) {
    return proa::guarded([&] {
        require(pool && out, "An argument is a null pointer.");
        *out = pool->host.pool.redone();
    });
}

int proa_layout(int format, int64_t rows, int64_t columns, int64_t group, proa_layout_info* out) {
    return proa::guarded([&] {
        require(out, "An argument is a null pointer.");
        const proa::Layout l = proa::checked_layout(format, rows, columns, group);
        *out = {l.panels, l.padded, l.group, int64_t(l.code_bytes), int64_t(l.scale_bytes), int64_t(l.panel_bytes)};
    });
}

int proa_pack(int format, int64_t rows, int64_t columns, int64_t group, const proa_source* s, int step, void* out,
              int64_t out_bytes) {
    return proa::guarded([&] {
        const proa::Layout l = proa::checked_layout(format, rows, columns, group);
        const proa::FormatFacts& facts = proa::facts_of(l.format);
        require(s && s->codes && out, "The source or the output of weights is a null pointer.");
        require(step >= 1, "The step between panels must be at least 1.");
        require(facts.scale_bytes == 0 || s->scales, "This format needs scales.");
        require(!facts.has_min || s->mins, "This format needs minimums.");
        require(!facts.block_scale_bytes || (s->block_scales && (!facts.has_min || s->block_mins)),
                "This format needs block scales.");
        require(s->scale_rows >= 1, "scale_rows must be at least 1.");
        require(facts.scale_type != proa::ScaleType::kF32Panel || s->scale_rows % proa::kPanelRows == 0 ||
                    rows <= proa::kPanelRows,
                "With one scale per panel and group, scale_rows must be a multiple of 16.");
        require(out_bytes >= int64_t(((l.panels - 1) * size_t(step) + 1) * l.panel_bytes), "The output is too small.");
        proa::pack_rows(
            l,
            {(const uint8_t*)s->codes, size_t(s->code_stride), (const uint8_t*)s->scales, size_t(s->scale_stride),
             int(s->scale_rows), (const uint8_t*)s->mins, (const uint8_t*)s->block_scales,
             (const uint8_t*)s->block_mins, size_t(s->block_stride), s->factor},
            int(rows), step, (uint8_t*)out);
    });
}

int proa_matrix_create(int format, int64_t rows, int64_t columns, int64_t group, int64_t count, int64_t slices,
                       const int32_t* first_panels, const void* const* data, const int64_t* strides,
                       const int64_t* bytes, proa_matrix** out) {
    return proa::guarded([&] {
        require(out, "An argument is a null pointer.");
        const proa::Layout l = proa::checked_layout(format, rows, columns, group);
        *out = new proa_matrix{proa::checked_matrix(l, count, slices, first_panels, data, strides, bytes)};
    });
}

int proa_matrix_destroy(proa_matrix* matrix) {
    return proa::guarded([&] { delete matrix; });
}

int proa_experts_create(const proa_matrix* gate_up, const proa_matrix* down, int activation, float limit,
                        const float* gate_bias, const float* down_bias, proa_experts** out) {
    return proa::guarded([&] {
        require(gate_up && down && out, "An argument is a null pointer.");
        require(activation >= 0 && activation < int(proa::Activation::kNone),
                "The activation must be one of PROA_ACTIVATION_*.");
        const proa::Layout &up = gate_up->matrix.layout, &low = down->matrix.layout;
        const int per = has_gate(proa::Activation(activation)) ? 2 : 1;
        require(gate_up->matrix.count == down->matrix.count, "gate_up and down must have the same number of experts.");
        require(up.panels % per == 0 && up.panels / per == (low.columns + 15) / 16,
                "gate_up must have a panel for every 16 columns of down, and two with a gate.");
        require(gate_up->matrix.slices.size() == down->matrix.slices.size(),
                "gate_up and down must have the same number of slices.");
        for (const proa::Slice& slice : gate_up->matrix.slices)
            require(slice.first_panel % per == 0, "Gate and up of the same rows must be in the same slice.");
        *out = new proa_experts{
            {&gate_up->matrix, &down->matrix, proa::Activation(activation), limit, gate_bias, down_bias}};
    });
}

int proa_experts_destroy(proa_experts* experts) {
    return proa::guarded([&] { delete experts; });
}

int proa_linear(proa_pool* pool, const proa_matrix* weights, int64_t outputs, const float* bias, const void* x,
                int64_t x_stride, void* y, int64_t y_stride, int wide, int64_t tokens, int lane) {
    return proa::guarded([&] {
        check_call(pool, tokens, lane);
        require(weights, "The matrix is a null pointer.");
        const proa::Matrix& m = weights->matrix;
        require(outputs >= 1 && outputs <= m.layout.rows,
                "The number of outputs must be between 1 and the rows of the matrix.");
        check_fit(pool, m);
        if (!tokens) return;
        check_rows(x, x_stride, m.layout.columns, "x");
        check_rows(y, y_stride, outputs, "y");
        // A named variable: late workers may read it until settle().
        const proa::Linear op{&m, int(outputs), bias, (const uint16_t*)x, x_stride, y, y_stride, wide != 0};
        proa::run(op, pool->host, int(tokens), lane);
        pool->host.pool.settle();
    });
}

int proa_moe(proa_pool* pool, const proa_experts* experts, int64_t top_k, const int32_t* ids, const float* weights,
             const void* x, int64_t x_stride, void* y, int64_t y_stride, int wide, int64_t tokens, int lane) {
    return proa::guarded([&] {
        check_call(pool, tokens, lane);
        require(experts, "The experts are a null pointer.");
        const proa::Experts& e = experts->experts;
        require(top_k >= 0 && top_k <= 1024, "A token must have at most 1024 experts.");
        require(top_k == 0 || (ids && weights), "If top_k is not 0, ids and weights must not be null pointers.");
        require(top_k > 0 || e.gate_up->count == 1, "If top_k is 0, there must be exactly one expert.");
        check_fit(pool, *e.gate_up);
        if (!tokens) return;
        check_rows(x, x_stride, e.gate_up->layout.columns, "x");
        check_rows(y, y_stride, e.down->layout.rows, "y");
        const proa::Moe op{&e, int(top_k), ids, weights, (const uint16_t*)x, x_stride, y, y_stride, wide != 0};
        proa::run(op, pool->host, int(tokens), lane);
        pool->host.pool.settle();
    });
}

}  // extern "C"
