// Packed weight matrices: one, or the experts of a layer. Belongs here: addresses of panels. Never: ownership of
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace proa {

// The panels that a NUMA node holds, the same ones of every matrix of the stack.
struct Slice {
    int first_panel, end_panel;
    const uint8_t* data;
    size_t stride;  // bytes from one matrix of the stack to the next
};

// A stack of matrices of equal shape. Slice i lies on node i and is computed by its team; slices are consecutive.
struct Matrix {
    Layout layout;
    int count;
    std::vector<Slice> slices;

    const uint8_t* panel(int matrix, int slice, int panel) const {
        const Slice& s = slices[size_t(slice)];
        return s.data + size_t(matrix) * s.stride + size_t(panel - s.first_panel) * layout.panel_bytes;
    }
    size_t matrix_bytes() const { return size_t(layout.panels) * layout.panel_bytes; }
};

// Throws Error (argument) if there is no such layout.
Layout checked_layout(int format, int64_t rows, int64_t columns, int64_t group);

// Throws Error (argument) unless the slices cover all panels in order, with enough aligned memory.
Matrix checked_matrix(const Layout& layout, int64_t count, int64_t slices, const int32_t* first_panels,
                      const void* const* data, const int64_t* strides, const int64_t* bytes);

}  // namespace proa
