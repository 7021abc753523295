// The C interface of the tables: formats, stored types, limits, kernels of each instruction set.
#include "attention.h"
#include "delta.h"
#include "doorbell.h"
#include "error.h"
#include "formats.h"
#include "isa/attend.h"
#include "layout.h"
#include "proa/native.h"
#include "select.h"
#include "stored.h"

namespace {

using proa::Format;

constexpr proa_format_info info_of(const proa::FormatFacts& f) {
    const proa::CodeFacts& code = f.code();
    return {f.name,        f.label,
            code.name,     proa::kScales[int(f.scale_type)].name,
            f.group,       f.usual_group,
            code.bits,     code.values,
            code.words,    code.has_min,
            code.integers, f.block_groups,
            f.scale_bytes, f.block_scale_bytes,
            f.tail_bytes};
}

#define PROA_INFO(identifier, ...) info_of(proa::facts_of(Format::identifier)),
constexpr proa_format_info kInfos[] = {PROA_FORMATS(PROA_INFO)};
#undef PROA_INFO

constexpr proa_limit kLimits[] = {
    {"panel_rows", proa::kPanelRows},
    {"column_unit", proa::kColumnUnit},
    {"head_dim", proa::kMostHeadDim},
    {"direct_queries", proa::kDirectQueries},
    {"delta_taps", proa::kMostTaps},
    {"foreseen_rows", PROA_FORESEEN_ROWS},
    {"doorbell_failed", int32_t(proa::kFailed)},
    {"result_bytes", int32_t(proa::kVectorBlocking.result_bytes)},
    {"activations", int32_t(proa::Activation::kNone)},
};

template <class Row>
int give(const Row* table, size_t size, const Row** rows, int64_t* count, int64_t row_bytes) {
    return proa::guarded([&] {
        proa::require(rows && count, "An argument is a null pointer.");
        proa::require(row_bytes == int64_t(sizeof(Row)),
                      "The rows of the caller's header have another size: the caller was "
                      "compiled for another version of the library.");
        *rows = table, *count = int64_t(size);
    });
}

}  // namespace

extern "C" {

int proa_get_formats(const proa_format_info** rows, int64_t* count, int64_t row_bytes) {
    return give(kInfos, std::size(kInfos), rows, count, row_bytes);
}

int proa_get_stored_types(const proa_stored_info** rows, int64_t* count, int64_t row_bytes) {
    const auto types = proa::stored_types();
    return give(types.data(), types.size(), rows, count, row_bytes);
}

int proa_get_limits(const proa_limit** rows, int64_t* count, int64_t row_bytes) {
    return give(kLimits, std::size(kLimits), rows, count, row_bytes);
}

int proa_get_format_kernels(const char* isa, int format, proa_format_kernels* out) {
    return proa::guarded([&] {
        proa::require(isa && out, "An argument is a null pointer.");
        proa::require(format >= 0 && format < proa::kFormats,
                      "The format must be the index of a row of proa_get_formats.");
        *out = proa::kernels_named(isa)->format_kernels(Format(format));
    });
}

}  // extern "C"
