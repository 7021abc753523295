// Many tokens, experts one by one: a task multiplies some rows of one expert with all of its tokens. Results are stored
// by slot, one per (token, expert) pair, until the last phase sums each token's slots in the order of its experts. The
// alternative (moe.cc) is that a task sums its rows over all experts in the cache: it stores no intermediate results,
// but rereads all activations for every few rows, which costs more than the results do (decisions 012 and 017).
#include <algorithm>

#include "moe_call.h"

namespace proa {
namespace {

using Call = MoeCall;

constexpr int kSumTokens = 8;     // per summing task
constexpr int kOrderTokens = 64;  // per task that sorts slots: some microseconds

void multiply(const void* context, int task, int next, std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    call.multiply(*call.experts->down, call.down_tasks, task, next, scratch,
                  [&](const Group& g, Carver&) { return call.h(g); });
}

void publish(const void* context, int task, const std::byte* scratch) {
    const Call& call = *static_cast<const Call*>(context);
    const RowTasks::Place at = call.down_tasks.place(task);
    const Group& g = call.group[size_t(at.repeat)];
    const int panels = at.end - at.first;
    call.kernels->store_rows(reinterpret_cast<const float*>(scratch), panels, g.tokens,
                             call.down_bias(g.expert, at.first), panels * kPanelRows, true,
                             call.results + size_t(g.first) * call.result_columns + at.column, call.result_columns);
}

void add_up(const void* context, int task, const std::byte*) {
    const Call& call = *static_cast<const Call*>(context);
    const Moe& op = call.op;
    const RowTasks& tasks = call.down_tasks;
    const int end = std::min((task + 1) * kSumTokens, call.tokens);
    for (int t = task * kSumTokens; t < end; ++t) {
        const size_t each = size_t(call.choices()), begin = size_t(t) * each;
        int count = 0;
        while (count < int(each) && call.slots[begin + size_t(count)] >= 0) ++count;
        const float* from = call.results;
        for (int n = 0; n < tasks.nodes; from += tasks.panels[n++] * kPanelRows) {
            const int row = tasks.first[n] * kPanelRows;
            const int columns = std::min(tasks.panels[n] * kPanelRows, call.experts->down->layout.rows - row);
            if (columns <= 0) continue;
            call.kernels->sum_rows(from, call.result_columns, call.slots.data() + begin,
                                   call.slot_weights.data() + begin, count, columns, op.wide,
                                   value_at(op.y, op.wide, int64_t(t) * op.y_stride + row));
        }
    }
}

// Sorts each token's slots in ascending order, and so by expert; entries without an expert last.
struct Ordering {
    Call& call;

    static void run(const void* context, int task, const std::byte*) {
        Call& call = static_cast<const Ordering*>(context)->call;
        const size_t each = size_t(call.choices());
        const int end = std::min((task + 1) * kOrderTokens, call.tokens);
        for (int t = task * kOrderTokens; t < end; ++t) {
            int32_t* slots = call.slots.data() + size_t(t) * each;
            std::sort(slots, slots + each, [](int32_t a, int32_t b) { return uint32_t(a) < uint32_t(b); });
            for (size_t i = 0; i < each && slots[i] >= 0; ++i)
                call.slot_weights[size_t(t) * each + i] = call.weight[size_t(slots[i])];
        }
    }
};

}  // namespace

int result_parts(const Matrix& down, size_t slots, const Blocking& blocking) {
    const size_t bytes = slots * size_t(down.layout.panels) * kPanelRows * sizeof(float);
    return int(std::min(bytes / blocking.result_bytes, size_t(down.layout.panels) / 2)) + 1;
}

int result_columns(const Matrix& down, int parts) { return RowTasks(down, 2, 1, 0, parts).all_panels() * kPanelRows; }

void run_down_by_expert(MoeCall& call, Host& host, int parts, int lane) {
    const Matrix& down = *call.experts->down;
    const int threads = host.pool.threads();
    call.slot_weights.resize(call.slots.size());
    const Ordering ordering{call};
    host.pool.run(published(block_count(call.tokens, kOrderTokens), host.pool.nodes(), &ordering, Ordering::run), lane);
    for (int part = 0; part < parts; ++part) {
        if (part) host.pool.settle();  // a late worker may still read the previous part
        const size_t all = size_t(RowTasks(down, 2, 1, part, parts).all_panels()) * size_t(call.groups);
        const int step = panels_to_compute(2, all, threads, call.kernels->blocking);
        call.down_tasks = RowTasks(down, step, call.groups, part, parts);
        Phase phase{};
        call.down_tasks.describe(phase);
        phase.run_before = multiply, phase.publish = publish, phase.context = &call;
        host.pool.run(phase, lane);
        host.pool.run(published(block_count(call.tokens, kSumTokens), host.pool.nodes(), &call, add_up), lane);
    }
}

}  // namespace proa
