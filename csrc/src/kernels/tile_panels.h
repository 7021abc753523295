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

// Six sums, of three panels and one block of up to 32 tokens: fewer tiles come from L2 for them than for four. Both
// halves of the tokens have `rows` rows: of an odd number of tokens, they share one.
template <bool two_rows>
struct SixSums {
    static void clear(Tiles& tiles) {
        tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>(), tiles.zero<4>(), tiles.zero<5>();
    }
    // `steps` times 32 columns of panels `stride` bytes apart. Returns what is left to fetch.
    static Ahead add(Tiles& tiles, int steps, const uint8_t* w, size_t stride, const uint8_t* x, int tokens, int rows,
                     Ahead ahead) {
        const uint8_t* second = x + size_t(tokens - rows) * kLineBytes;
        const size_t step = size_t(tokens) * kLineBytes;
        for (int k = 0; k < steps; ++k, w += kTileBytes, x += step, second += step) {
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
        return ahead;
    }
    static void store(Tiles& tiles, int tokens, int rows, float* out, size_t out_stride) {
        float* second = out + (tokens - rows) * 16;
        tiles.store<0>(out), tiles.store<2>(out + out_stride), tiles.store<4>(out + 2 * out_stride);
        if constexpr (two_rows) {
            tiles.store<1>(second), tiles.store<3>(second + out_stride);
            tiles.store<5>(second + 2 * out_stride);
        }
    }
};

// One panel in bfloat16, or two or three `stride` bytes apart, times the blocks from token `from` on. out:
// [panels][tokens][16]. Returns what is left to fetch.
inline Ahead multiply_panels(Tiles& tiles, int padded, const uint8_t* w, size_t stride, int panels, const Packed& x,
                             int from, float* out, Ahead ahead) {
    const uint8_t* w1 = w + stride;
    const size_t out_stride = size_t(x.tokens) * 16;
    int shaped = 0;  // for blocks of this size
    each_block(x, padded, [&](const PackedBlock& block) {
        if (block.first < from) return;
        const int size = block.size;
        const bool two_rows = size > kTileRows;
        const uint8_t* lines = block.line(0, 0);
        float* out0 = out + size_t(block.first) * 16;
        if (panels == 3) {
            const int rows = two_rows ? (size + 1) / 2 : size;
            if (rows != shaped) tiles.shape_six(rows), shaped = rows;
            const auto multiply = [&]<class Sums>(Sums) {
                Sums::clear(tiles);
                ahead = Sums::add(tiles, padded / kTileColumns, w, stride, lines, size, rows, ahead);
                Sums::store(tiles, size, rows, out0, out_stride);
            };
            return two_rows ? multiply(SixSums<true>{}) : multiply(SixSums<false>{});
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

// Three panels times the first of several blocks, while they are expanded. Returns the bytes from one to the next.
template <class Code, class Scales, bool scaled>
size_t expand_and_multiply(Tiles& tiles, const Layout& l, const uint8_t* w, const Packed& x, float* out,
                           uint8_t* scratch, InStep ahead) {
    using Sums = SixSums<true>;
    const int columns = part_columns(l, scaled && Scales::kScaled);
    const Parts<Code, Scales, scaled> parts{l, w, kTilePanels, columns, block_count(l.padded, columns), scratch};
    each_block(x, l.padded, [&](const PackedBlock& block) {
        if (block.first) return;
        const int rows = (block.size + 1) / 2;
        tiles.shape_six(rows);
        Sums::clear(tiles);
        parts.expand(0, ahead);
        for (int i = 0; i < parts.count(); ++i) {
            parts.expand(i + 1, ahead);
            Sums::add(tiles, parts.steps(i), parts.place(i, 0), parts.stride(),
                      block.line(i * columns / kTileColumns, 0), block.size, rows, Ahead(nullptr, 0, 1));
        }
        Sums::store(tiles, block.size, rows, out, size_t(x.tokens) * 16);
    });
    return parts.stride();
}

// More tokens, or bfloat16: three panels at a time, or what is left.
template <class Code, class Scales, bool scaled>
void multiply_threes(Tiles& tiles, const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out,
                     uint8_t* scratch, const uint8_t* next) {
    const bool wide = l.format == Format::kBf16;
    const int blocks = block_count(x.tokens, x.how.block_tokens), steps = blocks * (l.padded / kTileColumns);
    const auto at_once = [](int left) { return left == 4 ? 2 : left < kTilePanels ? left : kTilePanels; };
    for (int i = 0, count; i < panels; i += count, w += count * l.panel_bytes, out += size_t(count) * x.tokens * 16) {
        count = at_once(panels - i);
        const int left = panels - i - count;
        const uint8_t* then = left ? w + count * l.panel_bytes : next;
        size_t stride = wide ? l.panel_bytes : size_t(l.padded) * 32;
        int from = 0;
        if (!wide && count == kTilePanels) {
            stride = expand_and_multiply<Code, Scales, scaled>(tiles, l, w, x, out, scratch, {then ? then : w});
            from = block_begin(x.tokens, blocks, 1), then = nullptr;
        }
        for (int p = 0; p < count && !wide && !from; ++p)
            expand_columns<Code, Scales, scaled>(l, w + p * l.panel_bytes, 0, l.padded, scratch + p * stride);
        multiply_panels(tiles, l.padded, wide ? w : scratch, stride, count, x, from, out,
                        Ahead(then, then ? size_t(at_once(left ? left : panels)) * l.panel_bytes : 0, steps));
        for (int p = 0; p < count; ++p)
            apply_factor<Scales, scaled>(w + p * l.panel_bytes + l.code_bytes, out + size_t(p) * x.tokens * 16,
                                         x.tokens);
    }
}

// What multiply_tiles needs: three panels in bfloat16, whole parts, if the format is another.
inline size_t tile_scratch_bytes(const Layout& l, int tokens) {
    if (l.format == Format::kBf16) return 0;
    const size_t panels = kTilePanels * size_t(round_up(l.padded, part_columns(l, true))) * 32;
    const size_t block = block_scratch_bytes(l);
    return tokens <= kTileTokens || block > panels ? block : panels;
}

// x is in tiles. next: see Kernels::matmul.
void multiply_tiles(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, uint8_t* scratch,
                    const uint8_t* next) {
    Tiles tiles;
    with_format(l.format, [&]<class Code, class Scales, Format>() {
        if (l.format != Format::kBf16 && x.tokens <= kTileTokens)
            return each_block(x, l.padded, [&](const PackedBlock& block) {
                multiply_one_block<Code, Scales>(tiles, l, w, panels, block, out, scratch, next);
            });
        if constexpr (kScalesAlone<Scales> && !Scales::kFewBits)
            if (l.groups == 1) return multiply_threes<Code, Scales, false>(tiles, l, w, panels, x, out, scratch, next);
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
