// Splitting the panels of a matrix into tasks. Belongs here: sizes of tasks, pure functions.
#pragma once

#include <algorithm>

#include "isa/kernels.h"
#include "matrix.h"
#include "pool.h"

namespace proa {

// Small enough that threads do not wait long for the last task of a phase, large enough to amortise starting a task
// (a microsecond, and the latency of memory).
constexpr size_t kLeastTaskBytes = 48 << 10, kMostTaskBytes = 256 << 10;
constexpr int kTasksPerThread = 16;

constexpr int kPanelsAtOnce = 4;  // most panels that a kernel multiplies with the same activations in registers

constexpr int kPackingTokens = 16;  // per packing task, which takes some microseconds

constexpr int kManyTokens = 16;  // from about here on arithmetic costs more than reading weights
constexpr int kComputeTasksPerThread = 4;

// Each slice's panels, or one of `parts` parts of them, in runs of `step` panels; every run `repeats` times (for groups
// of tokens, or for experts).
struct RowTasks {
    int step = 0, repeats = 0;
    int first[kMaxNodes] = {}, panels[kMaxNodes] = {};
    int chunks[kMaxNodes] = {};
    int begin[kMaxNodes + 1] = {};
    int nodes = 0;

    struct Place {
        int node, repeat, first, end;  // panels of the matrix
        int column;                    // first column of the part, with all slices' parts concatenated
    };

    RowTasks() = default;
    RowTasks(const Matrix& m, int step_panels, int times, int part = 0, int parts = 1)
        : step(step_panels), repeats(times), nodes(int(m.slices.size())) {
        begin[0] = 0;
        for (int n = 0; n < nodes; ++n) {
            const Slice& s = m.slices[size_t(n)];
            const int all = s.end_panel - s.first_panel, from = block_begin(all, parts, part);
            first[n] = s.first_panel + from, panels[n] = block_begin(all, parts, part + 1) - from;
            chunks[n] = (panels[n] + step - 1) / step;
            begin[n + 1] = begin[n] + chunks[n] * repeats;
        }
    }

    // Tasks of one repeat are consecutive: they read neighbouring memory.
    Place place(int task) const {
        int node = 0, before = 0;
        while (task >= begin[node + 1]) before += panels[node++];
        const int local = task - begin[node], chunk = local % chunks[node] * step;
        return {node, local / chunks[node], first[node] + chunk, first[node] + std::min(chunk + step, panels[node]),
                (before + chunk) * kPanelRows};
    }

    int all_panels() const {
        int all = 0;
        for (int n = 0; n < nodes; ++n) all += panels[n];
        return all;
    }

    void describe(Phase& phase) const {
        phase.nodes = nodes;
        std::copy(begin, begin + nodes + 1, phase.begin);
    }
};

// Number of panels per task if each task reads its panels once: a multiple of `unit`, 1 or 2, and of kPanelsAtOnce if
// there are enough. streamed: bytes read per panel; total: bytes of all tasks.
inline int panels_to_stream(int unit, size_t streamed, size_t total, int threads) {
    const size_t wanted = std::clamp(total / size_t(threads * kTasksPerThread), kLeastTaskBytes, kMostTaskBytes);
    const int panels = int(wanted / std::max<size_t>(streamed, 1));
    if (panels >= kPanelsAtOnce - 1) return (panels + 1) / kPanelsAtOnce * kPanelsAtOnce;
    return std::max(unit, panels / unit * unit);
}

// panels_to_stream for a phase over `groups` experts, where a task reads `matrices` of them.
inline int streamed_step(const Matrix& w, int unit, int matrices, int groups, int threads) {
    const Layout& l = w.layout;
    const size_t total = size_t(l.panels) * l.panel_bytes * size_t(groups);
    return panels_to_stream(unit, l.panel_bytes * size_t(matrices), total, threads);
}

// Number of panels per task with many tokens: the more panels, the less often activations are read again. all: panels
// of the phase, of which every thread should get some tasks.
inline int panels_to_compute(int unit, size_t all, int threads, const Blocking& blocking) {
    const size_t fair = all / size_t(threads * kComputeTasksPerThread);
    return int(std::clamp(fair / size_t(unit), size_t(1), size_t(blocking.most_panels / unit))) * unit;
}

// Weights are prefetched in parts of half a microsecond, after each of which the worker checks for tasks.
constexpr size_t kPartBytes = 4 << 10;
constexpr size_t parts_of(size_t bytes) { return (bytes + kPartBytes - 1) / kPartBytes; }

// Prefetches part `part` of `bytes` bytes of weights into the second-level cache; false if there is no such part.
inline bool fetch_part(const uint8_t* from, size_t bytes, size_t part) {
    if (part >= parts_of(bytes)) return false;
    const size_t end = std::min(bytes, (part + 1) * kPartBytes);
    for (size_t at = part * kPartBytes; at < end; at += kLineBytes) __builtin_prefetch(from + at, 0, 2);
    return true;
}

// A view of `tokens` packed rows from row `first` on; sums is null if the format needs none.
inline Packed packed_rows(const Kernels& k, const Layout& l, char* pairs, float* sums, size_t first, int tokens) {
    const Packing how = k.packing(l, tokens);
    return {pairs + first * k.row_bytes(l), sums && how.sums ? sums + first * (l.padded / 16) : nullptr, tokens, how};
}

// Address of element `i` of results in bfloat16, or float32 if wide.
inline void* value_at(void* y, bool wide, int64_t i) { return static_cast<std::byte*>(y) + i * (wide ? 4 : 2); }

}  // namespace proa
