// The memory layout of a packed weight matrix. Belongs here: sizes and offsets, pure functions. Never: arithmetic on
// weights.
//
// A panel is 16 rows. Its codes (quantised or bfloat16 values) come in lines of 64 bytes that hold the same few columns
// of all 16 rows: 4 bytes per row, so that a 32-bit lane of a vector is a row (and 16 bfloat16 lines are a B operand
// tile of AMX). Value i of a lane is at bit 16 * (i % 2) + bits * (i / 2): a shift leaves two neighbouring columns in
// the two halves. A panel's codes are followed by its scales, one vector of 16 rows per group of columns, in reading
// order. Columns are padded with zeros to whole groups and to kColumnUnit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

constexpr int kPanelRows = 16;
constexpr int kLineBytes = 64;
constexpr int kColumnUnit = 32;  // unit of padded widths: an AMX tile, and whole lines of any format

// Types of codes and scales. The values are part of the C ABI.
enum class Format : int32_t {
    kBf16 = 0,
    kFp16 = 1,
    kFp8Row = 2,    // e4m3, float32 per row and group
    kFp8Panel = 3,  // e4m3, one float32 per panel and group (blocks of 128 x 128, whole tensors)
    kMxfp8 = 4,     // e4m3, e8m0 per row and group
    kInt8F32 = 5,   // two's complement, float32 per row and group
    kInt8F16 = 6,   // the same with float16 (Q8_0)
    kInt4F32 = 7,   // (q - 8) * s
    kInt4F16 = 8,
    kInt4Bf16 = 9,
    kUint4F32 = 10,  // q * s + m
    kUint4F16 = 11,
    kUint4Bf16 = 12,
    kNvfp4 = 13,  // e2m1, e4m3 per row and group, float32 per panel
    kMxfp4 = 14,  // e2m1, e8m0 per row and group
    kQ4K = 15,    // q * (d * sc) - dmin * mn, groups of 32 in blocks of 256
    kQ6K = 16,    // (q - 32) * (d * sc), groups of 16 in blocks of 256
    kQ5K = 17,    // as Q4_K; codes of five bits are stored in six
};
constexpr int kFormats = 18;

struct FormatFacts {
    int code_bits;
    int scale_bytes;        // per group and panel
    int block_groups;       // groups that share a second-level scale; 1: there is none
    int block_scale_bytes;  // of the second level, before the block's scales
    int tail_bytes;         // once per panel, before all scales
    bool has_min;
};

constexpr FormatFacts kFacts[kFormats] = {
    {16, 0, 1, 0, 0, false},                                                       // bf16
    {16, 0, 1, 0, 0, false},                                                       // fp16
    {8, 64, 1, 0, 0, false},                                                       // fp8 per row
    {8, 4, 1, 0, 0, false},                                                        // fp8 per panel
    {8, 16, 1, 0, 0, false},                                                       // mxfp8
    {8, 64, 1, 0, 0, false},                                                       // int8, float32
    {8, 32, 1, 0, 0, false},                                                       // int8, float16
    {4, 64, 1, 0, 0, false},                                                       // int4
    {4, 32, 1, 0, 0, false},   {4, 32, 1, 0, 0, false}, {4, 128, 1, 0, 0, true},   // uint4
    {4, 64, 1, 0, 0, true},    {4, 64, 1, 0, 0, true},  {4, 16, 1, 0, 64, false},  // nvfp4
    {4, 16, 1, 0, 0, false},                                                       // mxfp4
    {4, 32, 8, 64, 0, true},                                                       // Q4_K
    {6, 16, 16, 32, 0, false},                                                     // Q6_K
    {6, 32, 8, 64, 0, true},                                                       // Q5_K
};

struct Layout {
    Format format;
    int rows, columns;
    int padded;  // columns, padded
    int group;   // columns that share a scale
    int groups;
    int panels;
    size_t code_bytes;   // per panel
    size_t scale_bytes;  // per panel, padded to lines
    size_t panel_bytes;  // sum of both
};

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// group 0 means one group of all columns. The caller has checked the arguments (see check_layout in matrix.h).
constexpr Layout layout_of(Format format, int rows, int columns, int group) {
    const FormatFacts& facts = kFacts[int(format)];
    Layout l{};
    l.format = format, l.rows = rows, l.columns = columns;
    const int block = group ? group * facts.block_groups : kColumnUnit;
    int unit = block;
    while (unit % kColumnUnit) unit += block;
    l.padded = round_up(columns, unit);
    l.group = group ? group : l.padded;
    l.groups = l.padded / l.group;
    l.panels = round_up(rows, kPanelRows) / kPanelRows;
    l.code_bytes = size_t(l.padded) * facts.code_bits * kPanelRows / 8;
    const size_t scales = facts.tail_bytes + size_t(l.groups) * facts.scale_bytes +
                          size_t(l.groups / facts.block_groups) * facts.block_scale_bytes;
    l.scale_bytes = (scales + kLineBytes - 1) / kLineBytes * kLineBytes;
    l.panel_bytes = l.code_bytes + l.scale_bytes;
    return l;
}

// Activations are packed by blocks of tokens; a block has, for every pair of columns, one pair per token. The sizes of
// blocks differ by at most one token.
constexpr int block_count(int tokens, int most) { return (tokens + most - 1) / most; }
constexpr int block_begin(int tokens, int blocks, int i) {
    const int base = tokens / blocks, longer = tokens % blocks;
    return i * base + (i < longer ? i : longer);
}

}  // namespace proa
