#include "linear.h"

#include "row_tasks.h"

namespace proa {
namespace {

constexpr size_t kAloneBytes =
    64 << 10;  // weight bytes times tokens that the caller computes alone: 1 to 2 microseconds

}  // namespace

struct LinearCall {
    Linear op;
    const Kernels* kernels;
    RowTasks tasks;
    int tokens, groups, packing_parts;  // packing_parts: tasks that pack one group
    char* pairs;
    float* sums;

    int begin(int group) const { return block_begin(tokens, groups, group); }
    Packed packed(int group) const {
        return packed_rows(*kernels, op.weights->layout, pairs, sums, size_t(begin(group)),
                           begin(group + 1) - begin(group));
    }
};

namespace {

using Call = LinearCall;

void pack(const Call& call, int task) {
    const Linear& op = call.op;
    const int group = task / call.packing_parts, part = task % call.packing_parts;
    const Layout& l = op.weights->layout;
    const Packed out = call.packed(group);
    call.kernels->pack(op.x + size_t(call.begin(group)) * size_t(op.x_stride), size_t(op.x_stride), nullptr,
                       block_begin(out.tokens, call.packing_parts, part),
                       block_begin(out.tokens, call.packing_parts, part + 1), l.columns, l.padded, out);
}

void multiply(const void* context, int task, int next, std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const Matrix& w = *call.op.weights;
    const RowTasks::Place at = call.tasks.place(task);
    const Packed x = call.packed(at.repeat);
    Carver parts(scratch);
    float* product = parts.take<float>(size_t(at.end - at.first) * x.tokens * 16);
    void* expanded = parts.take<char>(call.kernels->expand_bytes(w.layout, x.tokens));
    const RowTasks::Place behind = call.tasks.place(next < 0 ? task : next);
    const uint8_t* then = next < 0 ? nullptr : w.panel(0, behind.node, behind.first);
    call.kernels->matmul(w.layout, w.panel(0, at.node, at.first), at.end - at.first, x, product, expanded, then);
}

void publish(const void* context, int task, const std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const Linear& op = call.op;
    const RowTasks::Place at = call.tasks.place(task);
    const int row = at.first * kPanelRows, columns = std::min(at.end * kPanelRows, op.outputs) - row;
    const int first = call.begin(at.repeat), tokens = call.begin(at.repeat + 1) - first;
    if (columns <= 0) return;
    void* y = value_at(op.y, op.wide, int64_t(first) * op.y_stride + row);
    call.kernels->store_rows(reinterpret_cast<const float*>(scratch), (columns + kPanelRows - 1) / kPanelRows, tokens,
                             op.bias ? op.bias + row : nullptr, columns, op.wide, y, size_t(op.y_stride));
}

}  // namespace

void run(const Linear& op, Host& host, int tokens, int lane) {
    const Layout& l = op.weights->layout;
    const Kernels& k = host.kernels_of(lane);
    const int groups = block_count(tokens, k.blocking.group_tokens(l.padded)), largest = block_begin(tokens, groups, 1);
    const bool has_min = facts_of(l.format).has_min;
    const int threads = host.pool.threads();
    const int step = tokens > kManyTokens
                         ? panels_to_compute(2, size_t(l.panels) * size_t(groups), threads, k.blocking)
                         : panels_to_stream(2, l.panel_bytes, size_t(l.panels) * l.panel_bytes, threads);
    if (!op.call) op.call = std::make_shared<Call>();
    Call& call = *op.call;
    call.op = op, call.op.call.reset();
    call.kernels = &k, call.tasks = RowTasks(*op.weights, step, groups);
    call.tokens = tokens, call.groups = groups, call.packing_parts = block_count(largest, kPackingTokens);
    const auto carve = [&](Carver parts) {
        call.pairs = parts.take<char>(size_t(tokens) * k.row_bytes(l));
        call.sums = parts.take<float>(has_min ? size_t(tokens) * (l.padded / 16) : 0);
        return parts.used();
    };
    carve(Carver(host.workspace(lane, carve(Carver()))));
    if (!has_min) call.sums = nullptr;

    const int packing_tasks = groups * call.packing_parts;
    if (tokens <= kPackingTokens) {
        for (int task = 0; task < packing_tasks; ++task) pack(call, task);
    } else {
        host.pool.run(published(packing_tasks, host.pool.nodes(), &call,
                                [](const void* context, int task, const std::byte*) {
                                    pack(*static_cast<const Call*>(context), task);
                                }),
                      lane);
    }
    Phase phase{};
    call.tasks.describe(phase);
    phase.run_before = multiply, phase.publish = publish, phase.context = &call;
    if (size_t(l.panels) * l.panel_bytes * size_t(tokens) <= kAloneBytes)
        host.pool.run_alone(phase, lane);
    else
        host.pool.run(phase, lane);
}

}  // namespace proa
