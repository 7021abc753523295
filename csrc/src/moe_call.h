// Data that the phases of one call of the experts share. Never: arithmetic.
#pragma once

#include <vector>

#include "moe.h"
#include "row_tasks.h"

namespace proa {

// Tokens of one expert that are computed together; an expert with many tokens has several groups.
struct Group {
    int expert, first, tokens;  // first: index of its first slot
};

// A late worker may still read the indices of a phase whose task another worker has repeated: so they belong to the
// operation. Activations are in the workspace: garbage there only produces results that are never published.
struct MoeCall {
    Moe op;
    const Experts* experts;
    const Kernels* kernels;
    RowTasks up_tasks, down_tasks;
    int tokens, groups, most_tokens;
    std::vector<Group> group;
    std::vector<int> counts;
    std::vector<int32_t> index;  // token of each slot
    std::vector<float> weight;   // weight of each slot
    std::vector<int32_t> slots;  // [tokens][top_k], -1: no expert
    char *x_pairs, *h_pairs;
    float *x_sums, *h_sums;
    Handing handing;  // assigns gate and up tasks to the workers that have prefetched their weights
    std::vector<int> group_experts;
    bool shared_x;  // one token: all experts read the same row

    // If experts are computed one by one: see moe_by_expert.cc.
    bool by_expert;
    std::vector<float> slot_weights;  // weight of each entry of `slots`
    float* results;                   // [slots_used][result_columns]
    size_t result_columns;

    Packed x(const Group& g) const {
        return packed_rows(*kernels, experts->gate_up->layout, x_pairs, x_sums, shared_x ? 0 : size_t(g.first),
                           g.tokens);
    }
    Packed h(const Group& g) const {
        return packed_rows(*kernels, experts->down->layout, h_pairs, h_sums, size_t(g.first), g.tokens);
    }
    const uint8_t* first_panel(const Matrix& w, const RowTasks::Place& at) const {
        return w.panel(group[size_t(at.repeat)].expert, at.node, at.first);
    }
    int choices() const { return op.top_k ? op.top_k : 1; }  // experts per token
    int panels_per_row() const { return has_gate(experts->activation) ? 2 : 1; }
    // The biases of an expert's rows from panel `first` on, or null.
    const float* down_bias(int expert, int first) const {
        const size_t panel = size_t(expert) * size_t(experts->down->layout.panels) + size_t(first);
        return experts->down_bias ? experts->down_bias + panel * kPanelRows : nullptr;
    }

    // Computes one group's product, at the beginning of the scratch. x_of(group, carver): its activations. next: see
    // Phase.
    template <class F>
    void multiply(const Matrix& w, const RowTasks& tasks, int task, int next, std::byte* scratch, F&& x_of) const {
        const RowTasks::Place at = tasks.place(task);
        const Group& g = group[size_t(at.repeat)];
        const int panels = at.end - at.first;
        Carver parts(scratch);
        float* product = parts.take<float>(size_t(panels) * g.tokens * 16);
        void* expanded = parts.take<char>(kernels->expand_bytes(w.layout, g.tokens));
        kernels->matmul(w.layout, w.panel(g.expert, at.node, at.first), panels, x_of(g, parts), product, expanded,
                        next < 0 ? nullptr : first_panel(w, tasks.place(next)));
    }
};

// The second half of a call whose experts are computed one by one, in `parts` parts of the result's columns, which
// bounds the memory of intermediate results.
int result_parts(const Matrix& down, size_t slots, const Blocking& blocking);
int result_columns(const Matrix& down, int parts);  // columns of the largest part
void run_down_by_expert(MoeCall& call, Host& host, int parts, int lane);

}  // namespace proa
