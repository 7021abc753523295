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

#include "formats.h"

namespace proa {

constexpr int kPanelRows = 16;
constexpr int kLineBytes = 64;
constexpr int kColumnUnit = 32;  // unit of padded widths: an AMX tile, and whole lines of any format

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
    const FormatFacts& facts = facts_of(format);
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
