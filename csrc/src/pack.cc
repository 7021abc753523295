#include "pack.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"

namespace proa {
namespace {

template <class T>
T read(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// Eight codes below 16, one a byte -> value i at bit 16 (i % 2) + 4 (i / 2).
uint32_t nibbles(const uint8_t* codes) {
    const auto squeeze = [](uint64_t x) {  // bytes 0, 2, 4, 6 -> 16 bits
        x &= 0x00ff00ff00ff00ffull;
        x = (x | x >> 12) & 0x000000ff000000ffull;
        return uint32_t((x | x >> 24) & 0xffff);
    };
    const uint64_t x = read<uint64_t>(codes);
    return squeeze(x) | squeeze(x >> 8) << 16;
}

uint32_t bytes(const uint8_t* codes) {
    return codes[0] | uint32_t(codes[2]) << 8 | uint32_t(codes[1]) << 16 | uint32_t(codes[3]) << 24;
}

// Sixteen codes below 64 of one row -> its lanes of three lines.
void sixes(const uint8_t* codes, uint8_t* lane) {
    uint8_t low[16], high = 0;
    uint32_t upper = 0;
    for (int i = 0; i < 16; ++i) {
        low[i] = codes[i] & 15, high = codes[i] >> 4;
        upper |= uint32_t(high) << (16 * (i % 2) + 2 * (i / 2));
    }
    const uint32_t words[3] = {nibbles(low), nibbles(low + 8), upper};
    for (int i = 0; i < 3; ++i) std::memcpy(lane + i * kLineBytes, &words[i], 4);
}

// One row's codes into its lane. padded codes are readable.
void pack_lane(const Layout& l, const uint8_t* codes, int row, uint8_t* panel) {
    uint8_t* lane = panel + row * 4;
    const auto put = [&](int line, uint32_t word) { std::memcpy(lane + size_t(line) * kLineBytes, &word, 4); };
    switch (kFacts[int(l.format)].code_bits) {
        case 16:
            if (l.format == Format::kFp16) {  // a line holds 16 even columns' values, then 16 odd ones
                for (int k = 0; k < l.padded; ++k)
                    std::memcpy(panel + size_t(k) * 32 + row * 2, codes + size_t(k) * 2, 2);
                return;
            }
            for (int k = 0; k < l.padded; k += 2) put(k / 2, read<uint32_t>(codes + size_t(k) * 2));
            return;
        case 8:
            for (int k = 0; k < l.padded; k += 4) put(k / 4, bytes(codes + k));
            return;
        case 4:
            for (int k = 0; k < l.padded; k += 8) put(k / 8, nibbles(codes + k));
            return;
        default:
            for (int k = 0; k < l.padded; k += 16) sixes(codes + k, lane + size_t(k / 16) * 3 * kLineBytes);
    }
}

void check_codes(const Layout& l, const uint8_t* codes) {
    const int bits = kFacts[int(l.format)].code_bits;
    if (bits >= 8) return;
    const uint8_t most = uint8_t((1 << bits) - 1);
    if (std::any_of(codes, codes + l.columns, [&](uint8_t code) { return code > most; }))
        throw Error(PROA_ERROR_ARGUMENT, "A code does not fit in " + std::to_string(bits) + " bits.");
}

// One row's scales, which stand 16 rows a vector.
void pack_scales(const Layout& l, const Source& s, int source_row, int row, uint8_t* panel) {
    const FormatFacts& facts = kFacts[int(l.format)];
    if (!facts.scale_bytes) return;
    const int groups = (l.columns + l.group - 1) / l.group;  // the source's; padding has scales of 0
    uint8_t* area = panel + l.code_bytes;
    const uint8_t* scales = s.scales + size_t(source_row / s.scale_rows) * s.scale_stride;
    if (l.format == Format::kFp8Panel) {
        if (row == 0) std::memcpy(area, scales, size_t(groups) * 4);
        return;
    }
    if (l.format == Format::kNvfp4) {
        if (row == 0) std::memcpy(area, &s.factor, 4);
        if (std::any_of(scales, scales + groups, [](uint8_t code) { return code >= 0x7f; }))
            throw Error(PROA_ERROR_ARGUMENT, "A scale of nvfp4 is negative or not a number.");
    }
    const size_t size = size_t(facts.scale_bytes) / (facts.has_min ? 2 : 1) / kPanelRows;  // of one scale
    const uint8_t* mins = facts.has_min ? s.mins + size_t(source_row / s.scale_rows) * s.scale_stride : nullptr;
    const size_t block_bytes = facts.block_scale_bytes + size_t(facts.block_groups) * facts.scale_bytes;
    for (int g = 0; g < groups; ++g) {
        uint8_t* block = area + facts.tail_bytes + size_t(g / facts.block_groups) * block_bytes;
        uint8_t* at = block + facts.block_scale_bytes + size_t(g % facts.block_groups) * facts.scale_bytes;
        std::memcpy(at + size_t(row) * size, scales + size_t(g) * size, size);
        if (mins) std::memcpy(at + (16 + size_t(row)) * size, mins + size_t(g) * size, size);
        if (!facts.block_scale_bytes || g % facts.block_groups) continue;
        const size_t b = size_t(source_row) * s.block_stride + size_t(g / facts.block_groups) * 2;
        std::memcpy(block + row * 2, s.block_scales + b, 2);
        if (mins) std::memcpy(block + 32 + row * 2, s.block_mins + b, 2);
    }
}

}  // namespace

void pack_rows(const Layout& l, const Source& s, int rows, int step, uint8_t* out) {
    const size_t code_bytes = kFacts[int(l.format)].code_bits == 16 ? 2 : 1;
    std::vector<uint8_t> padded(size_t(l.padded) * code_bytes);
    for (int first = 0; first < rows; first += kPanelRows) {
        uint8_t* panel = out + size_t(first / kPanelRows) * size_t(step) * l.panel_bytes;
        std::memset(panel, 0, l.panel_bytes);
        for (int row = 0; row < std::min(kPanelRows, rows - first); ++row) {
            std::memcpy(padded.data(), s.codes + size_t(first + row) * s.code_stride, size_t(l.columns) * code_bytes);
            check_codes(l, padded.data());
            pack_lane(l, padded.data(), row, panel);
            pack_scales(l, s, first + row, row, panel);
        }
    }
}

}  // namespace proa
