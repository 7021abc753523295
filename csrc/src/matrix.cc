#include "matrix.h"

#include <string>

#include "error.h"
#include "pool.h"

namespace proa {
namespace {

constexpr int64_t kMostRows = int64_t(1) << 24, kMostColumns = int64_t(1) << 20;

}  // namespace

Layout checked_layout(int format, int64_t rows, int64_t columns, int64_t group) {
    if (format < 0 || format >= kFormats)
        throw Error(PROA_ERROR_ARGUMENT, "There is no weight format " + std::to_string(format) + ".");
    if (rows < 1 || rows > kMostRows || columns < 1 || columns > kMostColumns)
        throw Error(PROA_ERROR_ARGUMENT, "A matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                             " is outside of 1 x 1 to 2^24 x 2^20.");
    const int fixed = kFacts[format].group;
    const bool any = fixed == PROA_ANY_GROUP;
    if (any ? group < 0 || group % 16 || group > kMostColumns : group != fixed)
        throw Error(PROA_ERROR_ARGUMENT,
                    "Groups of " + std::to_string(group) + " columns do not fit the format " + kFacts[format].name +
                        ": " + (any ? "0 or a multiple of 16" : std::to_string(fixed)) + " was expected.");
    return layout_of(Format(format), int(rows), int(columns), int(group));
}

Matrix checked_matrix(const Layout& layout, int64_t count, int64_t slices, const int32_t* first_panels,
                      const void* const* data, const int64_t* strides, const int64_t* bytes) {
    require(count >= 1 && count <= 1 << 20, "A stack must have 1 to 2^20 matrices.");
    require(slices >= 1 && slices <= kMaxNodes, "A matrix must have 1 to 64 slices.");
    require(first_panels && data && strides && bytes, "The description of slices has null pointers.");
    Matrix matrix{layout, int(count), {}};
    for (int64_t i = 0; i < slices; ++i) {
        const int first = first_panels[i], end = i + 1 < slices ? first_panels[i + 1] : layout.panels;
        require(first == (i ? matrix.slices.back().end_panel : 0) && end >= first && end <= layout.panels,
                "Slices must cover all panels in order.");
        const size_t span = size_t(end - first) * layout.panel_bytes;
        require(span == 0 || (data[i] && reinterpret_cast<uintptr_t>(data[i]) % kLineBytes == 0),
                "The memory of packed weights must be aligned to 64 bytes.");
        require(strides[i] >= 0 && strides[i] % kLineBytes == 0 && (count == 1 || size_t(strides[i]) >= span),
                "Matrices of a stack must not overlap and must be aligned to 64 bytes.");
        require(bytes[i] >= 0 && size_t(bytes[i]) >= size_t(count - 1) * size_t(strides[i]) + span,
                "The memory of packed weights is too small.");
        matrix.slices.push_back({first, end, static_cast<const uint8_t*>(data[i]), size_t(strides[i])});
    }
    return matrix;
}

}  // namespace proa
