#include "moe.h"

#include <string>

#include "error.h"
#include "moe_call.h"
#include "read_ahead.h"

namespace proa {
namespace {

using Call = MoeCall;

void pack(const Call& call, const Group& g, const Packed& x) {
    const Layout& l = call.experts->gate_up->layout;
    call.kernels->pack(call.op.x, size_t(call.op.x_stride), call.index.data() + g.first, 0, g.tokens, l.columns,
                       l.padded, x);
}

// The task's own packed copy: it stays in this core's cache, while a shared one would come from other cores.
Packed packed_here(const Call& call, const Group& g, Carver& scratch) {
    const Layout& l = call.experts->gate_up->layout;
    char* pairs = scratch.take<char>(size_t(g.tokens) * call.kernels->row_bytes(l));
    const bool has_min = facts_of(l.format).has_min;
    float* sums = has_min ? scratch.take<float>(size_t(g.tokens) * size_t(l.padded / 16)) : nullptr;
    const Packed x = packed_rows(*call.kernels, l, pairs, sums, 0, g.tokens);
    pack(call, g, x);
    return x;
}

void multiply_up(const void* context, int task, int next, std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    call.multiply(*call.experts->gate_up, call.up_tasks, task, next, scratch, [&](const Group& g, Carver& parts) {
        return call.by_expert ? packed_here(call, g, parts) : call.x(g);
    });
}

void publish_up(const void* context, int task, const std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const Experts& e = *call.experts;
    const Matrix& w = *e.gate_up;
    const RowTasks::Place at = call.up_tasks.place(task);
    const Group& g = call.group[size_t(at.repeat)];
    const Packed h = call.h(g);
    const float* bias = e.gate_bias ? e.gate_bias + size_t(g.expert) * w.layout.panels * kPanelRows : nullptr;
    const int per = call.panels_per_row(), end = at.end / per, padded = e.down->layout.padded;
    call.kernels->activate(e.activation, e.limit, reinterpret_cast<const float*>(scratch), bias, at.first / per, end,
                           padded, h);
    if (at.end == w.layout.panels && end * kPanelRows < padded)
        call.kernels->clear_columns(end * kPanelRows, padded, h);
}

void multiply_down(const void* context, int task, int next, std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const Matrix& w = *call.experts->down;
    const RowTasks::Place at = call.down_tasks.place(task);
    const int panels = at.end - at.first;
    Carver parts(scratch);
    float* total = parts.take<float>(size_t(panels) * call.tokens * 16);
    float* part = parts.take<float>(size_t(panels) * call.most_tokens * 16);
    void* expanded = parts.take<char>(call.kernels->expand_bytes(w.layout, call.most_tokens));
    std::fill(total, total + size_t(panels) * call.tokens * 16, 0.f);
    for (int i = 0; i < call.groups; ++i) {
        const Group& g = call.group[size_t(i)];
        const uint8_t* then = i + 1 < call.groups ? w.panel(call.group[size_t(i) + 1].expert, at.node, at.first)
                              : next >= 0         ? w.panel(call.group[0].expert, call.down_tasks.place(next).node,
                                                            call.down_tasks.place(next).first)
                                                  : nullptr;
        call.kernels->matmul(w.layout, w.panel(g.expert, at.node, at.first), panels, call.h(g), part, expanded, then);
        call.kernels->accumulate(part, panels, g.tokens, call.index.data() + g.first, call.weight.data() + g.first,
                                 call.down_bias(g.expert, at.first), total, call.tokens);
    }
}

void publish_down(const void* context, int task, const std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const Moe& op = call.op;
    const Matrix& w = *call.experts->down;
    const RowTasks::Place at = call.down_tasks.place(task);
    const int row = at.first * kPanelRows, columns = std::min(at.end * kPanelRows, w.layout.rows) - row;
    call.kernels->store_rows(reinterpret_cast<const float*>(scratch), (columns + kPanelRows - 1) / kPanelRows,
                             call.tokens, nullptr, columns, op.wide, value_at(op.y, op.wide, row), size_t(op.y_stride));
}

void cut(Call& call, int expert, int first, int tokens, int most) {
    const int parts = block_count(tokens, most);
    for (int i = 0; i < parts; ++i) {
        const int begin = block_begin(tokens, parts, i), count = block_begin(tokens, parts, i + 1) - begin;
        call.group[size_t(call.groups++)] = {expert, first + begin, count};
        call.most_tokens = std::max(call.most_tokens, count);
    }
}

// Sorts slots by expert, then token; splits experts with many tokens into groups.
void sort(Call& call, int tokens) {
    const Moe& op = call.op;
    const int experts = call.experts->gate_up->count, choices = op.top_k ? tokens * op.top_k : tokens;
    const int most = call.kernels->blocking.group_tokens(call.experts->gate_up->layout.padded);
    call.counts.assign(size_t(experts) + 1, 0);
    call.index.resize(size_t(choices)), call.weight.resize(size_t(choices)), call.slots.resize(size_t(choices));
    call.group.resize(size_t(experts) + size_t(choices / most) + 1);
    call.groups = call.most_tokens = 0;
    int* counts = call.counts.data();
    for (int i = 0; i < choices; ++i) {
        const int id = op.top_k ? op.ids[i] : 0;
        if (id < -1 || id >= experts)
            throw Error(PROA_ERROR_ARGUMENT, "Expert id " + std::to_string(id) + " does not exist: there are " +
                                                 std::to_string(experts) + " experts.");
        if (id >= 0) ++counts[id + 1];
    }
    for (int e = 0; e < experts; ++e) {
        if (counts[e + 1]) cut(call, e, counts[e], counts[e + 1], most);
        counts[e + 1] += counts[e];
    }
    for (int t = 0, i = 0; t < tokens; ++t)
        for (const int end = i + call.choices(); i < end; ++i) {
            const int id = op.top_k ? op.ids[i] : 0;
            call.slots[size_t(i)] = id < 0 ? -1 : counts[id];
            if (id < 0) continue;
            call.index[size_t(counts[id])] = t;
            call.weight[size_t(counts[id]++)] = op.top_k ? op.weights[i] : 1.f;
        }
}

bool many_tokens(const Call& call) { return call.tokens > kManyTokens && call.most_tokens > kManyTokens; }

// Panels per task of gate and up.
int up_step(const Matrix& w, const Call& call, int threads) {
    const int unit = call.panels_per_row();
    if (!call.by_expert) return streamed_step(w, unit, 1, call.groups, threads);
    return panels_to_compute(unit, size_t(w.layout.panels) * size_t(call.groups), threads, call.kernels->blocking);
}

void carve(Call& call, Host& host, int parts, int lane) {
    const Experts& e = *call.experts;
    const Layout &up = e.gate_up->layout, &down = e.down->layout;
    const size_t choices = call.index.size(), packed = call.by_expert ? 0 : call.shared_x ? 1 : choices;
    call.result_columns = call.by_expert ? size_t(result_columns(*e.down, parts)) : 0;
    const auto take = [&](Carver memory) {
        call.x_pairs = memory.take<char>(packed * call.kernels->row_bytes(up));
        call.h_pairs = memory.take<char>(choices * call.kernels->row_bytes(down));
        call.x_sums = memory.take<float>(packed * (up.padded / 16));
        call.h_sums = memory.take<float>(choices * (down.padded / 16));
        call.results = memory.take<float>(choices * call.result_columns);
        return memory.used();
    };
    take(Carver(host.workspace(lane, take(Carver()))));
    if (!facts_of(up.format).has_min) call.x_sums = nullptr;
    if (!facts_of(down.format).has_min) call.h_sums = nullptr;
}

bool fetch_up(const void* context, int task, int part) {
    const Call& call = *static_cast<const Call*>(context);
    const Matrix& w = *call.experts->gate_up;
    const RowTasks::Place at = call.up_tasks.place(task);
    return fetch_part(call.first_panel(w, at), size_t(at.end - at.first) * w.layout.panel_bytes, size_t(part));
}

bool fetch_down(const void* context, int task, int part) {
    const Call& call = *static_cast<const Call*>(context);
    const Matrix& w = *call.experts->down;
    const RowTasks::Place at = call.down_tasks.place(task);
    const size_t bytes = size_t(at.end - at.first) * w.layout.panel_bytes, parts = parts_of(bytes);
    const size_t group = size_t(part) / parts;
    return group < size_t(call.groups) &&
           fetch_part(w.panel(call.group[group].expert, at.node, at.first), bytes, size_t(part) % parts);
}

// Assigns tasks to the workers that have their weights in cache; null if nothing was read ahead.
const Handing* hand_out(Call& call) {
    if (!call.op.ahead) return nullptr;
    call.group_experts.clear();
    for (int i = 0; i < call.groups; ++i) call.group_experts.push_back(call.group[size_t(i)].expert);
    proa::hand_out(*call.op.ahead, call.up_tasks, call.group_experts, call.handing);
    return &call.handing;
}

// Packs the activations while workers prefetch the weights of phase `up`.
void pack_before(const Call& call, Host& host, const Phase& up, int lane) {
    if (!call.shared_x)
        return host.pool.run(published(call.groups, host.pool.nodes(), &call,
                                       [](const void* context, int task, const std::byte*) {
                                           const Call& of = *static_cast<const Call*>(context);
                                           pack(of, of.group[size_t(task)], of.x(of.group[size_t(task)]));
                                       }),
                             lane, &up);
    host.pool.announce(up, lane);
    if (call.groups) pack(call, call.group[0], call.x(call.group[0]));
}

void run_pass(const Moe& op, MoeCall& call, Host& host, int tokens, int lane) {
    const Experts& e = *op.experts;
    call.op = op, call.op.call.reset();
    call.experts = &e, call.kernels = &host.kernels_of(lane), call.tokens = tokens, call.shared_x = tokens == 1;
    sort(call, tokens);
    call.by_expert = many_tokens(call);
    const int threads = host.pool.threads(), groups = call.groups;
    const int parts = call.by_expert ? result_parts(*e.down, call.index.size(), host.kernels->blocking) : 1;
    call.up_tasks = RowTasks(*e.gate_up, up_step(*e.gate_up, call, threads), groups);
    carve(call, host, parts, lane);

    Phase up{}, down{};
    call.up_tasks.describe(up);
    up.run_before = multiply_up, up.publish = publish_up, up.context = &call, up.handing = hand_out(call);
    if (call.by_expert) {
        host.pool.run(up, lane);
        return run_down_by_expert(call, host, parts, lane);
    }
    call.down_tasks = RowTasks(*e.down, streamed_step(*e.down, 2, groups, groups, threads), 1);
    call.down_tasks.describe(down);
    down.run_before = multiply_down, down.publish = publish_down, down.context = &call;
    up.fetch = fetch_up, down.fetch = fetch_down;
    pack_before(call, host, up, lane);
    host.pool.run(up, lane, &down);
    host.pool.run(down, lane);
}

}  // namespace

void run(const Moe& op, Host& host, int tokens, int lane) {
    if (!op.call) op.call = std::make_shared<MoeCall>();
    const int passes = block_count(tokens, host.kernels->blocking.pass_tokens);
    for (int i = 0; i < passes; ++i) {
        const int first = block_begin(tokens, passes, i), count = block_begin(tokens, passes, i + 1) - first;
        Moe part = op;
        if (op.top_k) part.ids += int64_t(first) * op.top_k, part.weights += int64_t(first) * op.top_k;
        part.x += int64_t(first) * op.x_stride;
        part.y = value_at(op.y, op.wide, int64_t(first) * op.y_stride);
        if (i) host.pool.settle();  // the next pass overwrites what a late worker of this one may read
        run_pass(part, *op.call, host, count, lane);
    }
}

}  // namespace proa
