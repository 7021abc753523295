// Panels of weights times packed activations by matrix tiles: 16 lines of a bfloat16 panel are an operand as they lie,
// 16 tokens by 32 columns the other. Other formats are expanded to bfloat16. Never: few
// tokens, which panels.h does better.
//
// Measured on Emerald Rapids, of what the unit does on registers: with weights and activations in L1 98 %; in L2, whose
// lines come at 60 bytes a cycle, 70 % with four sums and 76 to 80 % with six; with weights from RAM 58 and 61 %
// (decision 017). Blocks of columns, so that either operand stays in L1, gain nothing: the sums, stored and loaded
// again for each, cost as much.
#pragma once

constexpr int kTilePanels = 3;  // that are multiplied with the same activations at once, at most

// Two panels (or one) times one block of up to 32 tokens. x: its lines; out0, out1: [tokens][16]. Returns how far it
// fetched: by value, for every load of a tile may write to memory as far as the compiler knows.
template <bool two_panels, bool two_rows>
Ahead multiply_block(Tiles& tiles, int padded, const uint8_t* w0, const uint8_t* w1, const uint8_t* x, int tokens,
                     float* out0, float* out1, Ahead ahead) {
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    const size_t step = size_t(tokens) * kLineBytes;
    for (int k = 0; k < padded / kTileColumns; ++k) {
        tiles.load<6>(w0 + size_t(k) * kTileBytes);
        tiles.load<4>(x + k * step);
        tiles.multiply<0, 4, 6>();
        if constexpr (two_panels) {
            tiles.load<7>(w1 + size_t(k) * kTileBytes);
            tiles.multiply<1, 4, 7>();
        }
        if constexpr (two_rows) {
            tiles.load<5>(x + k * step + kTileBytes);
            tiles.multiply<2, 5, 6>();
            if constexpr (two_panels) tiles.multiply<3, 5, 7>();
        }
        ahead.step();
    }
    tiles.store<0>(out0);
    if constexpr (two_panels) tiles.store<1>(out1);
    if constexpr (two_rows) tiles.store<2>(out0 + kTileRows * 16);
    if constexpr (two_rows && two_panels) tiles.store<3>(out1 + kTileRows * 16);
    return ahead;
}

// Three panels `stride` bytes apart times one block of up to 32 tokens: six sums, for which fewer tiles come from L2
// than for four. Both halves of the tokens have `rows` rows: of an odd number of tokens, they share one.
template <bool two_rows>
Ahead multiply_three(Tiles& tiles, int padded, const uint8_t* w, size_t stride, const uint8_t* x, int tokens, int rows,
                     float* out, size_t out_stride, Ahead ahead) {
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>(), tiles.zero<4>(), tiles.zero<5>();
    const uint8_t* second = x + size_t(tokens - rows) * kLineBytes;
    const size_t step = size_t(tokens) * kLineBytes;
    for (int k = 0; k < padded / kTileColumns; ++k, w += kTileBytes, x += step, second += step) {
        tiles.load<7>(w);
        tiles.load<6>(x);
        tiles.multiply<0, 6, 7>();
        if constexpr (two_rows) {
            tiles.load<6>(second);
            tiles.multiply<1, 6, 7>();
        }
        tiles.load<7>(w + stride);
        if constexpr (two_rows) {
            tiles.multiply<3, 6, 7>();
            tiles.load<6>(x);
        }
        tiles.multiply<2, 6, 7>();
        tiles.load<7>(w + 2 * stride);
        tiles.multiply<4, 6, 7>();
        if constexpr (two_rows) {
            tiles.load<6>(second);
            tiles.multiply<5, 6, 7>();
        }
        ahead.step();
    }
    float* out_second = out + (tokens - rows) * 16;
    tiles.store<0>(out), tiles.store<2>(out + out_stride), tiles.store<4>(out + 2 * out_stride);
    if constexpr (two_rows) {
        tiles.store<1>(out_second), tiles.store<3>(out_second + out_stride);
        tiles.store<5>(out_second + 2 * out_stride);
    }
    return ahead;
}

// One panel in bfloat16, or two or three `stride` bytes apart, times all tokens. out: [panels][tokens][16]. Returns
// what is left to fetch.
inline Ahead multiply_panels(Tiles& tiles, int padded, const uint8_t* w, size_t stride, int panels, const Packed& x,
                             float* out, Ahead ahead) {
    const uint8_t* w1 = w + stride;
    const size_t out_stride = size_t(x.tokens) * 16;
    int shaped = 0;  // for blocks of this size
    each_block(x, padded, [&](const PackedBlock& block) {
        const int size = block.size;
        const bool two_rows = size > kTileRows;
        const uint8_t* lines = block.line(0, 0);
        float* out0 = out + size_t(block.first) * 16;
        if (panels == 3) {
            const int rows = two_rows ? (size + 1) / 2 : size;
            if (rows != shaped) tiles.shape_six(rows), shaped = rows;
            const auto multiply = two_rows ? multiply_three<true> : multiply_three<false>;
            ahead = multiply(tiles, padded, w, stride, lines, size, rows, out0, out_stride, ahead);
            return;
        }
        if (size != shaped) tiles.shape(two_rows ? kTileRows : size, two_rows ? size - kTileRows : 1), shaped = size;
        const auto run = [&](auto multiply) {
            ahead = multiply(tiles, padded, w, w1, lines, size, out0, out0 + out_stride, ahead);
        };
        if (panels == 2) return two_rows ? run(multiply_block<true, true>) : run(multiply_block<true, false>);
        two_rows ? run(multiply_block<false, true>) : run(multiply_block<false, false>);
    });
    return ahead;
}

// How scales are taken into account. bfloat16 holds every code exactly, and a code times its scale where the scale has
// few bits (microscaling formats, nvfp4): those are exact. Others' scales are multiplied in float32 after each group's
// sum, which is exact too, or, from 17 tokens on, rounded into the weights: sums that are taken out of the tiles for
// each group and token then cost more than that.
inline bool exact_before(Format f) { return f == Format::kNvfp4 || f == Format::kMxfp4 || f == Format::kMxfp8; }
inline bool exact_after(const Layout& l) { return l.format != Format::kFp16 && l.group % kTileColumns == 0; }

inline bool by_tiles(const Layout& l, int tokens) {
    return tokens >= (exact_before(l.format) || exact_after(l) ? kTilesFromTokens : kWideFromTokens);
}

// Tokens of a block of pairs: with scales there are more before tiles come where groups are smaller than a tile, of
// which Q6_K alone is common. The other ones go by as few as all formats have.
constexpr int most_pairs(Format f) {
    return f == Format::kBf16 || f == Format::kFp16 ? kMostPlain
           : f == Format::kQ6K                      ? kMostScaled
                                                    : kTilesFromTokens - 1;
}

// ---- one block of tokens: weights are expanded a little at a time, one part ahead of the products that read it from
// L1

constexpr int kPartColumns = 128;

// Sums that stay in the tiles to the end: scales multiplied before (scaled), or one for the whole row.
template <class Code, class Scales, bool scaled, bool two_rows>
void multiply_through(Tiles& tiles, const Layout& l, const uint8_t* w, const PackedBlock& block, float* out,
                      uint8_t* scratch, Ahead& ahead) {
    int part = scaled ? l.group : kPartColumns;  // whole groups and whole tiles
    while (part < kPartColumns || part % kTileColumns) part += l.group;
    uint8_t* parts[2] = {scratch, scratch + size_t(part) * 32};
    tiles.zero<0>(), tiles.zero<2>();
    const auto expand = [&](int i) {
        const int end = (i + 1) * part < l.padded ? (i + 1) * part : l.padded;
        if (i * part < end) expand_columns<Code, Scales, scaled>(l, w, i * part, end, parts[i % 2]);
    };
    expand(0);
    for (int i = 0; i * part < l.padded; ++i) {
        expand(i + 1);
        for (int k = 0; k < part / kTileColumns && i * part + k * kTileColumns < l.padded; ++k) {
            const int columns32 = i * (part / kTileColumns) + k;
            tiles.load<6>(parts[i % 2] + size_t(k) * kTileBytes);
            tiles.load<4>(block.line(columns32, 0));
            tiles.multiply<0, 4, 6>();
            if constexpr (two_rows) tiles.load<5>(block.line(columns32, kTileRows));
            if constexpr (two_rows) tiles.multiply<2, 5, 6>();
            ahead.step();
        }
    }
    tiles.store<0>(out);
    if constexpr (two_rows) tiles.store<2>(out + kTileRows * 16);
    apply_factor<Scales, scaled>(w + l.code_bytes, out, block.size);
}

// Adds the sums of four groups from `first` on, times their scales, to out.
template <class Scales>
inline void add_groups(const Layout& l, const uint8_t* scales, int first, const PackedBlock& block,
                       const float (&sums)[4][kTileRows * 16], float* out) {
    F32 scale[4], minimum[4];
    unrolled<4>([&](auto i) {
        const bool any = first + i.value < l.groups;
        scale[i.value] = any ? Scales::scale(scales, first + i.value) : zero();
        if constexpr (Scales::kHasMin) minimum[i.value] = any ? Scales::minimum(scales, first + i.value) : zero();
    });
    for (int t = 0; t < block.size; ++t) {
        F32 total = first ? load(out + t * 16) : zero();
        unrolled<4>([&](auto i) {
            total = fma(scale[i.value], load(sums[i.value] + t * 16), total);
            if constexpr (Scales::kHasMin)
                if (first + i.value < l.groups)
                    total = fma(minimum[i.value], set(block.sum(first + i.value, l.group, t)), total);
        });
        store(out + t * 16, total);
    }
}

// At most 16 tokens: sums of four groups are taken out of the tiles together.
template <class Code, class Scales>
void multiply_groups(Tiles& tiles, const Layout& l, const uint8_t* w, const PackedBlock& block, float* out,
                     uint8_t* scratch, Ahead& ahead) {
    alignas(64) float sums[4][kTileRows * 16];
    const int steps = l.group / kTileColumns;
    const size_t part_bytes = size_t(4 * l.group < l.padded ? 4 * l.group : l.padded) * 32;
    const auto expand = [&](int first) {
        const int end = (first + 4 < l.groups ? first + 4 : l.groups) * l.group;
        if (first < l.groups) expand_codes<Code>(w, first * l.group, end, scratch + first / 4 % 2 * part_bytes);
    };
    expand(0);
    for (int first = 0; first < l.groups; first += 4) {
        expand(first + 4);
        const uint8_t* from = scratch + first / 4 % 2 * part_bytes;
        unrolled<4>([&](auto i) {
            tiles.zero<i.value>();
            for (int k = 0; k < steps && first + i.value < l.groups; ++k) {
                tiles.load<6 + i.value % 2>(from + size_t(i.value * steps + k) * kTileBytes);
                tiles.load<4>(block.line((first + i.value) * steps + k, 0));
                tiles.multiply<i.value, 4, 6 + i.value % 2>();
                ahead.step();
            }
            tiles.store<i.value>(sums[i.value]);
        });
        add_groups<Scales>(l, w + l.code_bytes, first, block, sums, out);
    }
}

template <class Code, class Scales, bool two_rows>
void multiply_one_block(Tiles& tiles, const Layout& l, const uint8_t* w, int panels, const PackedBlock& block,
                        float* out, uint8_t* scratch, const uint8_t* next) {
    tiles.shape(two_rows ? kTileRows : block.size, two_rows ? block.size - kTileRows : block.size);
    const bool one_scale = l.groups == 1 && !Scales::kHasMin;  // of each row
    const bool after = exact_after(l) && !exact_before(l.format) && (one_scale || !two_rows);
    for (int p = 0; p < panels; ++p, w += l.panel_bytes, out += size_t(block.size) * 16) {
        const uint8_t* then = p + 1 < panels ? w + l.panel_bytes : next;
        Ahead ahead(then, then ? l.panel_bytes : 0, l.padded / kTileColumns);
        if constexpr (Scales::kScaled && !Scales::kHasFactor) {
            if (after && one_scale) {
                multiply_through<Code, Scales, false, two_rows>(tiles, l, w, block, out, scratch, ahead);
                continue;
            }
            if (after) {
                multiply_groups<Code, Scales>(tiles, l, w, block, out, scratch, ahead);
                continue;
            }
        }
        multiply_through<Code, Scales, true, two_rows>(tiles, l, w, block, out, scratch, ahead);
    }
}

// ---- more tokens, or bfloat16: three panels at a time, expanded whole for all blocks

template <class Code, class Scales, bool scaled>
void multiply_threes(Tiles& tiles, const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out,
                     uint8_t* scratch, const uint8_t* next) {
    const bool wide = l.format == Format::kBf16;
    const size_t stride = wide ? l.panel_bytes : size_t(l.padded) * 32;
    const int steps = block_count(x.tokens, x.how.block_tokens) * (l.padded / kTileColumns);
    const auto at_once = [](int left) { return left == 4 ? 2 : left < kTilePanels ? left : kTilePanels; };
    for (int i = 0, count; i < panels; i += count, w += count * l.panel_bytes, out += size_t(count) * x.tokens * 16) {
        count = at_once(panels - i);
        const int left = panels - i - count;
        const uint8_t* then = left ? w + count * l.panel_bytes : next;
        for (int p = 0; p < count && !wide; ++p)
            expand_columns<Code, Scales, scaled>(l, w + p * l.panel_bytes, 0, l.padded, scratch + p * stride);
        multiply_panels(tiles, l.padded, wide ? w : scratch, stride, count, x, out,
                        Ahead(then, then ? size_t(at_once(left ? left : panels)) * l.panel_bytes : 0, steps));
        for (int p = 0; p < count; ++p)
            apply_factor<Scales, scaled>(w + p * l.panel_bytes + l.code_bytes, out + size_t(p) * x.tokens * 16,
                                         x.tokens);
    }
}

// scratch: kTilePanels panels in bfloat16, if the format is another. x is in tiles. next: see Kernels::matmul.
void multiply_tiles(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, uint8_t* scratch,
                    const uint8_t* next) {
    Tiles tiles;
    with_format(l.format, [&]<class Code, class Scales, Format>() {
        if (l.format != Format::kBf16 && x.tokens <= kTileTokens)
            return each_block(x, l.padded, [&](const PackedBlock& block) {
                block.size > kTileRows
                    ? multiply_one_block<Code, Scales, true>(tiles, l, w, panels, block, out, scratch, next)
                    : multiply_one_block<Code, Scales, false>(tiles, l, w, panels, block, out, scratch, next);
            });
        if constexpr (kScalesAlone<Scales>)
            if (l.groups == 1 && !exact_before(l.format))
                return multiply_threes<Code, Scales, false>(tiles, l, w, panels, x, out, scratch, next);
        multiply_threes<Code, Scales, true>(tiles, l, w, panels, x, out, scratch, next);
    });
}

// The unit's products on registers alone, as peak() has them. Of `seed` and its negative in turn: sums stay small.
double tile_peak(int64_t rounds, float seed, float* sums) {
    alignas(64) uint16_t values[kTileRows * kTileColumns];
    for (int i = 0; i < kTileRows * kTileColumns; ++i) values[i] = to_bf16(i % 2 ? seed : -seed);
    Tiles tiles;
    tiles.shape(kTileRows, kTileRows);
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    tiles.load<4>(values), tiles.load<5>(values), tiles.load<6>(values), tiles.load<7>(values);
    for (int64_t round = 0; round < rounds; ++round) {
        tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>();
        tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
    }
    alignas(64) float out[kTileBytes / sizeof(float)];
    tiles.store<0>(out);
    __builtin_memcpy(sums, out, kLineBytes);
    return double(rounds) * 4 * kTileRows * kTileRows * kTileColumns * 2;
}
