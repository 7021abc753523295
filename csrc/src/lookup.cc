#include "lookup.h"

#include <string>
#include <vector>

#include "error.h"

namespace proa {
namespace {

const uint8_t* panel_of(const Matrix& table, int panel) {
    int slice = 0;
    while (panel >= table.slices[size_t(slice)].end_panel) ++slice;
    return table.panel(0, slice, panel);
}

}  // namespace

// Runs on the calling thread: a row is a few kilobytes, which is little compared with a step's weights.
void run(const Lookup& op, Host& host, int rows, int lane) {
    const Layout& l = op.table->layout;
    for (int t = 0; t < rows; ++t)
        if (op.tokens[t] < 0 || op.tokens[t] >= l.rows)
            throw Error(PROA_ERROR_ARGUMENT, "Token " + std::to_string(op.tokens[t]) +
                                                 " is outside of the vocabulary of " + std::to_string(l.rows) + ".");
    const bool plain = l.format == Format::kBf16;
    std::byte* scratch = plain ? nullptr : host.workspace(lane, size_t(l.padded) * 32);
    for (int t = 0; t < rows; ++t) {
        const int token = int(op.tokens[t]);
        const uint8_t* panel = panel_of(*op.table, token / kPanelRows);
        if (!plain) {
            host.kernels->expand(l, panel, scratch);
            panel = reinterpret_cast<const uint8_t*>(scratch);
        }
        const uint16_t* row = reinterpret_cast<const uint16_t*>(panel) + token % kPanelRows * 2;
        uint16_t* out = op.out.data + int64_t(t) * op.out.stride;
        for (int k = 0; k < l.columns; ++k) out[k] = row[size_t(k / 2) * (kLineBytes / 2) + size_t(k % 2)];
    }
}

}  // namespace proa
