#include "head_linear.h"

#include <cstring>

#include "error.h"
#include "row_tasks.h"
#include "rows.h"

namespace proa {

struct HeadLinearCall {
    HeadLinear op;
    const Kernels* kernels;
    RowTasks tasks;  // one repeat per head and group of tokens
    int tokens, groups;

    int head(const RowTasks::Place& at) const { return at.repeat / groups; }
    int first(const RowTasks::Place& at) const { return block_begin(tokens, groups, at.repeat % groups); }
    int end(const RowTasks::Place& at) const { return block_begin(tokens, groups, at.repeat % groups + 1); }
};

namespace {

using Call = HeadLinearCall;

// Every task packs its own input, which is cheap compared with its weights or its products.
void multiply(const void* context, int task, std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const HeadLinear& op = call.op;
    const Layout& l = op.weights->layout;
    const RowTasks::Place at = call.tasks.place(task);
    const int tokens = call.end(at) - call.first(at), panels = at.end - at.first;
    Carver parts(scratch);
    float* product = parts.take<float>(size_t(panels) * size_t(tokens) * 16);
    char* pairs = parts.take<char>(size_t(tokens) * call.kernels->row_bytes(l));
    void* expanded = parts.take<char>(call.kernels->expand_bytes(l, tokens));
    const Packed x = packed_rows(*call.kernels, l, pairs, nullptr, 0, tokens);
    const uint16_t* from = op.x + call.first(at) * op.x_stride + call.head(at) * op.x_apart;
    call.kernels->pack(from, size_t(op.x_stride), nullptr, 0, tokens, l.columns, l.padded, x);
    call.kernels->matmul(l, op.weights->panel(call.head(at), at.node, at.first), panels, x, product, expanded, nullptr);
}

void publish(const void* context, int task, const std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const HeadLinear& op = call.op;
    const Layout& l = op.weights->layout;
    const RowTasks::Place at = call.tasks.place(task);
    const int first = call.first(at), tokens = call.end(at) - first;
    const int row = at.first * kPanelRows, columns = std::min(at.end * kPanelRows, l.rows) - row;
    uint16_t* y = op.y + first * op.y_stride + call.head(at) * op.y_apart;
    call.kernels->store_rows(reinterpret_cast<const float*>(scratch), at.end - at.first, tokens, nullptr, columns,
                             false, y + row, size_t(op.y_stride));
    if (at.column > 0 || op.carried == 0) return;  // only the task with the first panels copies
    const uint16_t* x = op.x + first * op.x_stride + call.head(at) * op.x_apart;
    for (int t = 0; t < tokens; ++t)
        std::memcpy(y + t * op.y_stride + l.rows, x + t * op.x_stride + l.columns, size_t(op.carried) * 2);
}

}  // namespace

void check(const HeadLinear& op) {
    const Layout& l = op.weights->layout;
    require(l.format == Format::kBf16, "The weights of heads must be bfloat16.");
    require(op.carried >= 0 && op.carried <= 1 << 16, "The number of carried elements must be between 0 and 2^16.");
    require(op.x_apart >= l.columns + op.carried && op.y_apart >= l.rows + op.carried,
            "Heads overlap: x_apart or y_apart is less than a head.");
    const int64_t before = op.weights->count - 1;
    check_rows(op.x, op.x_stride, before * op.x_apart + l.columns + op.carried, "the input of heads");
    check_rows(op.y, op.y_stride, before * op.y_apart + l.rows + op.carried, "the output of heads");
}

void run(const HeadLinear& op, Host& host, int tokens, int lane) {
    if (tokens == 0) return;
    const Matrix& w = *op.weights;
    const Layout& l = w.layout;
    const Kernels& k = host.kernels_of(lane);
    if (!op.call) op.call = std::make_shared<Call>();
    Call& call = *op.call;
    call.op = op, call.op.call.reset();
    call.kernels = &k, call.tokens = tokens, call.groups = block_count(tokens, k.blocking.group_tokens(l.padded));
    const int repeats = w.count * call.groups, threads = host.pool.threads();
    const size_t all = size_t(l.panels) * size_t(repeats);
    const int step = tokens > kManyTokens ? panels_to_compute(2, all, threads, k.blocking)
                                          : panels_to_stream(2, l.panel_bytes, all * l.panel_bytes, threads);
    call.tasks = RowTasks(w, step, repeats);
    Phase phase{};
    call.tasks.describe(phase);
    phase.run = multiply, phase.publish = publish, phase.context = &call;
    host.pool.run(phase, lane);
}

}  // namespace proa
