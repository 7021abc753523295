// Blocks of GGUF taken apart: the layouts of ggml's block_q4_0, q4_1, q8_0, q4_K and q6_K.
#include <cstring>
#include <string>

#include "error.h"
#include "pack.h"

namespace proa {
namespace {

struct BlockFacts {
    Format format;
    int columns, bytes;
};

BlockFacts facts_of(GgufType type) {
    switch (type) {
        case GgufType::kQ4_0: return {Format::kInt4F16, 32, 18};
        case GgufType::kQ4_1: return {Format::kUint4F16, 32, 20};
        case GgufType::kQ8_0: return {Format::kInt8F16, 32, 34};
        case GgufType::kQ4_K: return {Format::kQ4K, 256, 144};
        case GgufType::kQ6_K: return {Format::kQ6K, 256, 210};
    }
    throw Error(PROA_ERROR_ARGUMENT, "GGUF type " + std::to_string(int(type)) + " has no packed format.");
}

// Where one row's codes and scales go.
struct Row {
    uint8_t *codes, *scales, *mins, *block_scales, *block_mins;
};

// The rows of a panel as codes and scales.
class PanelRows {
  public:
    PanelRows(const Layout& l, int blocks)
        : codes_(size_t(l.padded)),
          scales_(size_t(l.groups) * 2),
          block_scales_(size_t(blocks) * 2),
          memory_(kPanelRows * (codes_ + 2 * scales_ + 2 * block_scales_)) {}

    Row row(int r) {
        const size_t i = size_t(r);
        return {part(0) + i * codes_, part(1) + i * scales_, part(2) + i * scales_, part(3) + i * block_scales_,
                part(4) + i * block_scales_};
    }
    Source source() { return {part(0), codes_, part(1), scales_, 1, part(2), part(3), part(4), block_scales_, 1.f}; }

  private:
    uint8_t* part(int i) {
        const size_t sizes[] = {codes_, scales_, scales_, block_scales_};
        size_t first = 0;
        for (int k = 0; k < i; ++k) first += kPanelRows * sizes[k];
        return memory_.data() + first;
    }

    size_t codes_, scales_, block_scales_;  // bytes of a row
    std::vector<uint8_t> memory_;
};

void take_q4(const uint8_t* block, int i, bool has_min, const Row& row) {
    std::memcpy(row.scales + i * 2, block, 2);
    if (has_min) std::memcpy(row.mins + i * 2, block + 2, 2);
    const uint8_t* packed = block + (has_min ? 4 : 2);
    uint8_t* codes = row.codes + i * 32;
    for (int j = 0; j < 16; ++j) codes[j] = packed[j] & 15, codes[j + 16] = packed[j] >> 4;
}

// d, dmin, 12 bytes of 6-bit scales and minimums of 8 groups, 128 bytes of nibbles.
void take_q4_k(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.block_scales + i * 2, block, 2);
    std::memcpy(row.block_mins + i * 2, block + 2, 2);
    const uint8_t* six = block + 4;
    for (int g = 0; g < 8; ++g) {
        const bool direct = g < 4;
        row.scales[i * 8 + g] = direct ? six[g] & 63 : uint8_t((six[g + 4] & 15) | (six[g - 4] >> 6) << 4);
        row.mins[i * 8 + g] = direct ? six[g + 4] & 63 : uint8_t((six[g + 4] >> 4) | (six[g] >> 6) << 4);
    }
    for (int part = 0; part < 4; ++part)
        for (int j = 0; j < 32; ++j) {
            const uint8_t both = block[16 + part * 32 + j];
            uint8_t* codes = row.codes + i * 256 + part * 64;
            codes[j] = both & 15, codes[j + 32] = both >> 4;
        }
}

// 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales, d.
void take_q6_k(const uint8_t* block, int i, const Row& row) {
    for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 32; ++j) {
            const uint8_t* low = block + half * 64;
            const uint8_t high = block[128 + half * 32 + j];
            uint8_t* codes = row.codes + i * 256 + half * 128 + j;
            codes[0] = uint8_t((low[j] & 15) | (high & 3) << 4);
            codes[32] = uint8_t((low[j + 32] & 15) | (high >> 2 & 3) << 4);
            codes[64] = uint8_t((low[j] >> 4) | (high >> 4 & 3) << 4);
            codes[96] = uint8_t((low[j + 32] >> 4) | (high >> 6) << 4);
        }
    std::memcpy(row.scales + i * 16, block + 192, 16);
    std::memcpy(row.block_scales + i * 2, block + 208, 2);
}

void take(GgufType type, const uint8_t* block, int i, const Row& row) {
    switch (type) {
        case GgufType::kQ4_0: return take_q4(block, i, false, row);
        case GgufType::kQ4_1: return take_q4(block, i, true, row);
        case GgufType::kQ8_0:
            std::memcpy(row.scales + i * 2, block, 2);
            std::memcpy(row.codes + i * 32, block + 2, 32);
            return;
        case GgufType::kQ4_K: return take_q4_k(block, i, row);
        case GgufType::kQ6_K: return take_q6_k(block, i, row);
    }
}

}  // namespace

Format format_of(GgufType type) { return facts_of(type).format; }

void pack_gguf(GgufType type, const Layout& l, const uint8_t* blocks, size_t row_stride, int rows, int step,
               uint8_t* out) {
    const BlockFacts facts = facts_of(type);
    if (l.columns % facts.columns || l.format != facts.format)
        throw Error(PROA_ERROR_ARGUMENT, "Rows of " + std::to_string(l.columns) + " columns are not whole blocks of " +
                                             std::to_string(facts.columns) + ", or the format is another.");
    const int count = l.columns / facts.columns;
    PanelRows parts(l, count);
    for (int first = 0; first < rows; first += kPanelRows) {
        const int here = rows - first < kPanelRows ? rows - first : kPanelRows;
        for (int r = 0; r < here; ++r)
            for (int i = 0; i < count; ++i)
                take(type, blocks + size_t(first + r) * row_stride + size_t(i) * size_t(facts.bytes), i, parts.row(r));
        pack_rows(l, parts.source(), here, step, out + size_t(first / kPanelRows) * size_t(step) * l.panel_bytes);
    }
}

}  // namespace proa
