#include "coded.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bfloat16.h"
#include "error.h"
#include "finite.h"
#include "nibbles.h"
#include "words.h"

namespace proa {
namespace {

int codes_of_byte(Stored type) { return facts_of(type).block_values; }

// The stored type of a format's scales: float32 if it has none.
Stored scale_type(Format format) {
    switch (facts_of(format).scale_type) {
        case ScaleType::kE8m0: return Stored::kE8m0;
        case ScaleType::kE4m3: return Stored::kE4m3;
        case ScaleType::kF16: return Stored::kF16;
        case ScaleType::kBf16: return Stored::kBf16;
        default: return Stored::kF32;
    }
}

bool has_codes(Format format, Stored type) {
    if (facts_of(format).block_groups > 1) return false;  // only GGUF's types have two-level scales
    switch (code_of(format)) {
        case CodeType::kE4m3: return type == Stored::kE4m3;
        case CodeType::kInt8: return type == Stored::kInt8 || type == Stored::kUint8;
        case CodeType::kInt4: return type == Stored::kInt4 || type == Stored::kSigned4;
        case CodeType::kUint4: return type == Stored::kUint4;
        case CodeType::kE2m1: return type == Stored::kE2m1;
        default: return false;
    }
}

// Eight codes of four bits, the first in the lowest -> value i at bit 16 (i % 2) + 4 (i / 2).
uint32_t word_of_packed(uint32_t codes) {
    const auto every_second = [](uint32_t x) {
        x &= 0x0f0f0f0f;
        x = (x | x >> 4) & 0x00ff00ff;
        return (x | x >> 8) & 0xffff;
    };
    return every_second(codes) | every_second(codes >> 4) << 16;
}

void words_of(Stored type, const uint8_t* codes, int padded, uint32_t* words) {
    if (codes_of_byte(type) == 2) {
        const uint32_t flip = type == Stored::kSigned4 ? 0x88888888 : 0;  // two's complement to code - 8
        for (int k = 0; k < padded; k += 8) words[k / 8] = word_of_packed(read<uint32_t>(codes + k / 2) ^ flip);
        return;
    }
    const uint32_t flip = type == Stored::kUint8 ? 0x80808080 : 0;  // code - 128 in two's complement
    for (int k = 0; k < padded; k += 4) words[k / 4] = word_of_bytes(read<uint32_t>(codes + k) ^ flip);
}

// Transposes 8 x 8 four-bit codes in every lane of vectors of words: code i of word j <-> code j of word i.
template <class Words>
void transpose_eight(Words (&words)[8]) {
    constexpr uint32_t kMasks[3] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
    for (int stage = 0; stage < 3; ++stage)
        for (int i = 0; i < 8; ++i)
            if (!(i >> stage & 1)) {
                Words &low = words[i], &high = words[i | 1 << stage];
                const Words swapped = (low >> (4 << stage) ^ high) & kMasks[stage];
                high ^= swapped, low ^= swapped << (4 << stage);
            }
}

constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // AWQ: row i of eight is 4-bit field kPlaces[i] of a word

// Reads eight columns from k on and transposes them: word kPlaces[r] has columns k to k + 8 of row n + r, its other
// lanes those of rows 8, 16, ... further on.
template <class Words>
void read_awq(const uint8_t* stored, size_t stride, int n, int k, Words (&words)[8]) {
    for (int i = 0; i < 8; ++i) words[i] = read<Words>(stored + size_t(k + i) * stride + size_t(n) / 2);
    transpose_eight(words);
}

void transpose_awq(const uint8_t* stored, size_t stride, int rows, int columns, uint8_t* to) {
    constexpr int kSide = 32;   // side of squares, which are transposed with vectors
    constexpr int kBlock = 64;  // rows of the target that stay in the cache
    const size_t row_bytes = size_t(columns) / 2;
    const int whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
    for (int first = 0; first < whole_rows; first += kBlock)
        for (int k = 0; k < whole_columns; k += kSide)
            for (int n = first; n < std::min(whole_rows, first + kBlock); n += kSide) {
                FourWords words[4][8], unused{};
                for (int i = 0; i < 4; ++i) read_awq(stored, stride, n, k + i * 8, words[i]);
                for (int r = 0; r < 8; ++r)
                    transpose_four(reinterpret_cast<const uint8_t*>(&words[0][kPlaces[r]]), sizeof words[0],
                                   to + size_t(n + r) * row_bytes + size_t(k) / 2, 8 * row_bytes, unused);
            }
    for (int n = 0; n < rows; n += 8)
        for (int k = n < whole_rows ? whole_columns : 0; k < columns; k += 8) {
            uint32_t words[8];
            read_awq(stored, stride, n, k, words);
            for (int r = 0; r < 8; ++r)
                std::memcpy(to + size_t(n + r) * row_bytes + size_t(k) / 2, &words[kPlaces[r]], 4);
        }
}

}  // namespace

bool keeps(const Layout& l, Stored type, const Scales& scales) {
    const int group = scales.group ? scales.group : l.padded;
    const bool whole_panels = scales.stride == 0 || (scales.rows % kPanelRows == 0 && scales.first % kPanelRows == 0);
    return has_codes(l.format, type) && scale_type(l.format) == scales.type && l.group == group &&
           (scales.mins != nullptr) == facts_of(l.format).has_min && !scales.group_of &&
           (scales.factor == 1.f || l.format == Format::kNvfp4) && (l.format != Format::kFp8Panel || whole_panels);
}

bool pack_coded(const Layout& l, Stored type, const Scales& scales, int first, const uint8_t* codes, size_t stride,
                int rows, int step, uint8_t* out) {
    const size_t words = l.code_bytes / kLineBytes;
    std::vector<uint32_t> all(words * kPanelRows);
    const size_t bytes = size_t(l.columns) / size_t(codes_of_byte(type));
    std::vector<uint8_t> padded(l.padded == l.columns ? 0 : size_t(l.padded));
    Source source;
    source.scales = scales.data, source.scale_stride = scales.stride, source.scale_rows = scales.rows;
    source.mins = scales.mins, source.factor = scales.factor;
    bool finite = true;
    for (int at = 0; at < rows; at += kPanelRows) {
        const int here = std::min(kPanelRows, rows - at);
        uint8_t* panel = out + size_t(at / kPanelRows) * size_t(step) * l.panel_bytes;
        for (int r = 0; r < here; ++r) {
            const uint8_t* row = codes + size_t(at + r) * stride;
            if (!padded.empty()) row = (const uint8_t*)std::memcpy(padded.data(), row, bytes);
            finite &= all_finite(type, row, size_t(l.columns));
            words_of(type, row, l.padded, all.data() + size_t(r) * words);
        }
        put_lines(l, (const uint8_t*)all.data(), words * 4, here, panel);
        put_scales(l, source, int(scales.first) + first + at, here, panel);
    }
    return finite;
}

namespace {

// Returns the scales or minimums of a row as floats; zeros if `of` is null.
std::vector<float> floats_of(const Scales& s, const uint8_t* of, int row, int groups) {
    std::vector<float> found(static_cast<size_t>(groups));
    if (of) to_float(s.type, of + size_t((s.first + row) / s.rows) * s.stride, found.size(), found.data());
    return found;
}

constexpr uint8_t kEvery[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};  // all 4-bit codes, in order

// Dequantises 4-bit codes whose scales cover many columns: a table of the 16 values is rounded once per scale.
void nibbles_to_bf16(Stored type, const Scales& s, int row, int group, const uint8_t* codes, int columns,
                     uint16_t* to) {
    const int groups = (columns + group - 1) / group;
    const std::vector<float> scales = floats_of(s, s.data, row, groups), mins = floats_of(s, s.mins, row, groups);
    constexpr int kAtOnce = 16;  // groups
    float values[16], scaled[16 * kAtOnce];
    uint16_t tables[kAtOnce][16];
    to_float(type, kEvery, 16, values);
    for (int first = 0; first < groups; first += kAtOnce) {
        const int here = std::min(kAtOnce, groups - first);
        for (int g = 0; g < here; ++g) {
            const float scale = scales[size_t(first + g)], minimum = mins[size_t(first + g)];
            for (int i = 0; i < 16; ++i) scaled[16 * g + i] = values[i] * scale * s.factor + minimum;
        }
        round_to_bf16(scaled, 16 * size_t(here), tables[0]);
        const int k = first * group, end = std::min(columns, k + here * group);
        look_up_nibbles(tables, group / 2, codes + k / 2, (end - k) / 2, to + k);
    }
}

// Dequantises 4-bit codes whose scales cover few columns: one product per column, of values that are exact in bfloat16.
void nibbles_times_scales(Stored type, const Scales& s, int row, int group, const uint8_t* codes, int columns,
                          uint16_t* to) {
    const int groups = (columns + group - 1) / group;
    const std::vector<float> scales = floats_of(s, s.data, row, groups), mins = floats_of(s, s.mins, row, groups);
    float values[16];
    uint16_t table[1][16];
    to_float(type, kEvery, 16, values);
    round_to_bf16(values, 16, table[0]);
    look_up_nibbles(table, columns / 2, codes, columns / 2, to);
    scale_bf16(to, columns, group, scales.data(), mins.data(), s.factor);
}

}  // namespace

void coded_to_float(Stored type, const Scales& s, int row, const uint8_t* codes, int columns, float* to) {
    to_float(type, codes, size_t(columns), to);
    const int group = s.group ? s.group : columns, stored = int(s.stride) / facts_of(s.type).block_bytes;
    const int groups = s.group_of ? stored : (columns + group - 1) / group;
    const std::vector<float> scales = floats_of(s, s.data, row, groups), mins = floats_of(s, s.mins, row, groups);
    const float factor = s.factor;
    if (s.group_of) {
        for (int k = 0; k < columns; ++k) {
            const size_t g = size_t(s.group_of[k]);
            to[k] = to[k] * scales[g] * factor + mins[g];
        }
        return;
    }
    for (int g = 0; g < groups; ++g) {
        const float scale = scales[size_t(g)], minimum = mins[size_t(g)];
        for (int k = g * group; k < std::min(columns, (g + 1) * group); ++k) to[k] = to[k] * scale * factor + minimum;
    }
}

void coded_to_bf16(Stored type, const Scales& scales, int row, const uint8_t* codes, int columns, uint16_t* to) {
    const int group = scales.group ? scales.group : columns;
    if (codes_of_byte(type) == 2 && group % 2 == 0 && !scales.group_of)
        return (group < 32 ? nibbles_times_scales : nibbles_to_bf16)(type, scales, row, group, codes, columns, to);
    std::vector<float> values(static_cast<size_t>(columns));
    coded_to_float(type, scales, row, codes, columns, values.data());
    round_to_bf16(values.data(), values.size(), to);
}

int transposed_rows(Stored type, Order order, int columns) {
    return order == Order::kWordsTransposed ? columns / (4 * codes_of_byte(type)) : columns;
}

size_t transposed_bytes(Order order, int rows) {
    return order == Order::kWordsTransposed ? size_t(rows) * 4 : size_t(rows) / 2;
}

void transpose(Stored type, Order order, const uint8_t* stored, size_t stride, int rows, int columns, uint8_t* to) {
    if (order == Order::kAwqTransposed) return transpose_awq(stored, stride, rows, columns, to);
    const int words = transposed_rows(type, order, columns);
    for (int first = 0; first < rows; first += kPanelRows)  // this many rows of the target stay in the cache
        for (int w = 0; w < words; ++w)
            for (int r = first; r < std::min(rows, first + kPanelRows); ++r)
                std::memcpy(to + (size_t(r) * size_t(words) + size_t(w)) * 4,
                            stored + size_t(w) * stride + size_t(r) * 4, 4);
}

}  // namespace proa
