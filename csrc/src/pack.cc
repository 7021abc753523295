#include "pack.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"
#include "finite.h"
#include "words.h"

namespace proa {
namespace {

// Packs one row's codes, padded, into words, one per line.
void words_of(const Layout& l, const uint8_t* codes, uint32_t* words) {
    switch (facts_of(l.format).code_bits) {
        case 16: std::memcpy(words, codes, size_t(l.padded) * 2); return;
        case 8:
            for (int k = 0; k < l.padded; k += 4) words[k / 4] = word_of_bytes(read<uint32_t>(codes + k));
            return;
        case 4:
            for (int k = 0; k < l.padded; k += 8) words[k / 8] = word_of_nibbles(read<uint64_t>(codes + k));
            return;
        default:
            for (int k = 0; k < l.padded; k += 16)
                words_of_sixes(read<uint64_t>(codes + k), read<uint64_t>(codes + k + 8), words + k / 16 * 3);
    }
}

// Reorders a line of float16: the values of the 16 even columns, then those of the odd ones.
void part_even_and_odd(uint8_t* line) {
    uint16_t both[32];
    std::memcpy(both, line, sizeof both);
    for (int i = 0; i < 32; ++i) std::memcpy(line + (i % 2 * 16 + i / 2) * 2, &both[i], 2);
}

void check_codes(const Layout& l, const uint8_t* codes) {
    const int bits = facts_of(l.format).code_bits;
    if (bits >= 8) return;
    const uint8_t most = uint8_t((1 << bits) - 1);
    if (std::any_of(codes, codes + l.columns, [&](uint8_t code) { return code > most; }))
        throw Error(PROA_ERROR_ARGUMENT, "A code does not fit in " + std::to_string(bits) + " bits.");
}

// Stores one row's scales and minimums, of type T, into their vectors, after those of the blocks.
template <class T>
void put_scales(const Layout& l, const Source& s, int source_row, int row, uint8_t* area) {
    const FormatFacts& facts = facts_of(l.format);
    const int groups = (l.columns + l.group - 1) / l.group;  // the source's; padding has scales of 0
    const size_t skip = size_t(source_row / s.scale_rows) * s.scale_stride;
    const uint8_t *scales = s.scales + skip, *mins = facts.has_min ? s.mins + skip : nullptr;
    const size_t block_bytes = facts.block_scale_bytes + size_t(facts.block_groups) * facts.scale_bytes;
    for (int first = 0, b = 0; first < groups; first += facts.block_groups, ++b) {
        uint8_t* at = area + facts.tail_bytes + size_t(b) * block_bytes;
        if (facts.block_scale_bytes) {
            const size_t from = size_t(source_row) * s.block_stride + size_t(b) * 2;
            std::memcpy(at + row * 2, s.block_scales + from, 2);
            if (mins) std::memcpy(at + 32 + row * 2, s.block_mins + from, 2);
        }
        at += facts.block_scale_bytes + size_t(row) * sizeof(T);
        for (int g = first; g < std::min(first + facts.block_groups, groups); ++g, at += facts.scale_bytes) {
            std::memcpy(at, scales + size_t(g) * sizeof(T), sizeof(T));
            if (mins) std::memcpy(at + kPanelRows * sizeof(T), mins + size_t(g) * sizeof(T), sizeof(T));
        }
    }
}

// Stores one row's scales into vectors of 16 rows.
void put_row_scales(const Layout& l, const Source& s, int source_row, int row, uint8_t* panel) {
    const FormatFacts& facts = facts_of(l.format);
    if (!facts.scale_bytes) return;
    const int groups = (l.columns + l.group - 1) / l.group;  // the source's; padding has scales of 0
    uint8_t* area = panel + l.code_bytes;
    const uint8_t* scales = s.scales + size_t(source_row / s.scale_rows) * s.scale_stride;
    if (facts.scale_type == ScaleType::kF32Panel) {
        if (row == 0) std::memcpy(area, scales, size_t(groups) * 4);
        return;
    }
    if (facts.tail_bytes) {
        if (row == 0) std::memcpy(area, &s.factor, 4);
        if (std::any_of(scales, scales + groups, [](uint8_t code) { return code >= 0x7f; }))
            throw Error(PROA_ERROR_ARGUMENT, "A scale of nvfp4 is negative or NaN.");
    }
    switch (kScales[int(facts.scale_type)].bytes / kPanelRows) {  // bytes per scale
        case 1: return put_scales<uint8_t>(l, s, source_row, row, area);
        case 2: return put_scales<uint16_t>(l, s, source_row, row, area);
        default: return put_scales<uint32_t>(l, s, source_row, row, area);
    }
}

}  // namespace

uint32_t put_lines(const Layout& l, const uint8_t* words, size_t stride, int rows, uint8_t* panel) {
    constexpr int kTile = 16;  // lines that stay in the cache while all rows are stored
    const int lines = int(l.code_bytes / kLineBytes);
    const int fours = rows / 4 * 4, whole = lines / 4 * 4;
    FourWords seen{};
    if (rows < kPanelRows) std::memset(panel, 0, l.code_bytes);
    for (int first = 0; first < lines; first += kTile) {
        const int end = std::min(first + kTile, lines), end_of_fours = std::min(end, whole);
        for (int row = 0; row < fours; row += 4)
            for (int line = first; line < end_of_fours; line += 4)
                transpose_four(words + size_t(row) * stride + line * 4, stride,
                               panel + size_t(line) * kLineBytes + row * 4, kLineBytes, seen);
        for (int row = 0; row < rows; ++row)
            for (int line = row < fours ? end_of_fours : first; line < end; ++line) {
                const auto word = read<uint32_t>(words + size_t(row) * stride + line * 4);
                seen[0] |= word;
                std::memcpy(panel + size_t(line) * kLineBytes + row * 4, &word, 4);
            }
    }
    if (l.format == Format::kFp16)
        for (int line = 0; line < lines; ++line) part_even_and_odd(panel + size_t(line) * kLineBytes);
    return seen[0] | seen[1] | seen[2] | seen[3];
}

void put_scales(const Layout& l, const Source& s, int first, int rows, uint8_t* panel) {
    std::memset(panel + l.code_bytes, 0, l.scale_bytes);
    for (int row = 0; row < rows; ++row) put_row_scales(l, s, first + row, row, panel);
}

namespace {

// True if 16-bit values are finite, given the bitwise or of their words. Values below 2 lack the exponent's highest
// bit, and weights are seldom larger: values are tested one by one only if some word has that bit.
bool finite_rows(const Layout& l, const Source& s, int first, int rows, uint32_t seen) {
    if (!(seen & 0x40004000)) return true;
    const Stored type = l.format == Format::kBf16 ? Stored::kBf16 : Stored::kF16;
    for (int row = first; row < first + rows; ++row)
        if (!all_finite(type, s.codes + size_t(row) * s.code_stride, size_t(l.columns))) return false;
    return true;
}

}  // namespace

bool pack_rows(const Layout& l, const Source& s, int rows, int step, uint8_t* out) {
    const size_t code_bytes = facts_of(l.format).code_bits == 16 ? 2 : 1;
    const size_t words = l.code_bytes / kLineBytes;
    const bool as_they_are = code_bytes == 2 && l.padded == l.columns;
    std::vector<uint8_t> padded(size_t(l.padded) * code_bytes);
    std::vector<uint32_t> all(as_they_are ? 0 : words * kPanelRows);
    bool finite = true;
    for (int first = 0; first < rows; first += kPanelRows) {
        const int here = std::min(kPanelRows, rows - first);
        const uint8_t* codes = s.codes + size_t(first) * s.code_stride;
        uint8_t* panel = out + size_t(first / kPanelRows) * size_t(step) * l.panel_bytes;
        uint32_t seen;
        if (as_they_are) {
            seen = put_lines(l, codes, s.code_stride, here, panel);
        } else {
            for (int row = 0; row < here; ++row) {
                std::memcpy(padded.data(), codes + size_t(row) * s.code_stride, size_t(l.columns) * code_bytes);
                check_codes(l, padded.data());
                words_of(l, padded.data(), all.data() + size_t(row) * words);
            }
            seen = put_lines(l, (const uint8_t*)all.data(), words * 4, here, panel);
        }
        if (code_bytes == 2) finite &= finite_rows(l, s, first, here, seen);
        put_scales(l, s, first, here, panel);
    }
    return finite;
}

}  // namespace proa
