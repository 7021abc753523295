// Products of panels of weights with packed activations by matrix tiles. One operand is 16 lines of a bfloat16 panel,
// without repacking; the other is 16 tokens by 32 columns. Other formats are expanded to bfloat16. Never: few tokens,
// for which panels.h is faster.
//
// Measured on Emerald Rapids, relative to the unit's peak on registers: 98 % with weights and activations in L1; in L2,
// which delivers 60 bytes per cycle, 70 % with four sums and 76 to 80 % with six; with weights from RAM 58 and 61 %
// (decision 017). Blocking columns, so that either operand stays in L1, gains nothing: storing and reloading the sums
// for each block costs as much.
#pragma once

// Multiplies one panel in bfloat16, or two or three `stride` bytes apart, with all blocks of tokens from block `first`
// on. out: [panels][tokens][16]. Returns what is left to prefetch.
inline Ahead multiply_panels(Tiles& tiles, int padded, const uint8_t* w, size_t stride, int panels, const Packed& x,
                             int first, float* out, Ahead ahead) {
    int shaped = 0;  // block size that the tiles are configured for
    for (int i = first; i < blocks_of(x); ++i) {
        const PackedBlock block = block_of(x, padded, i);
        const TileSums& sums = tile_sums(panels, block.size > kTileRows);
        if (block.size != shaped) sums.shape(tiles, block.size), shaped = block.size;
        sums.clear(tiles);
        sums.add_ahead(tiles, w, stride, block, 0, padded / kTileColumns, ahead);
        sums.store(tiles, block.size, out + size_t(block.first) * 16, size_t(x.tokens) * 16);
    }
    return ahead;
}

// Multiplies more than one block of tokens, or bfloat16 panels: three panels at a time, then those that remain. With
// several blocks, the first is multiplied while the panels are expanded.
template <class Code, class Scales, bool scaled>
void multiply_threes(Tiles& tiles, const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out,
                     uint8_t* scratch, const uint8_t* next) {
    const bool wide = l.format == Format::kBf16;
    const int steps = blocks_of(x) * (l.padded / kTileColumns), columns = part_columns(l, scaled && Scales::kScaled);
    const size_t out_stride = size_t(x.tokens) * 16;
    const auto at_once = [](int left) { return left == 4 ? 2 : left < kTilePanels ? left : kTilePanels; };
    for (int i = 0, count; i < panels; i += count, w += count * l.panel_bytes, out += count * out_stride) {
        count = at_once(panels - i);
        const int left = panels - i - count;
        const uint8_t* then = left ? w + count * l.panel_bytes : next;
        const Parts<Code, Scales, scaled> parts{l, w, count, columns, block_count(l.padded, columns), scratch};
        if (!wide && count == kTilePanels) {
            const PackedBlock block = block_of(x, l.padded, 0);
            ThreePanels<true>::shape(tiles, block.size);
            multiply_parts(tiles, ThreePanels<true>{}, parts, block, out, out_stride, {then ? then : w});
            multiply_panels(tiles, l.padded, scratch, parts.stride(), count, x, 1, out, Ahead::nothing());
        } else {
            for (int p = 0; p < count && !wide; ++p)
                expand_columns<Code, Scales, scaled>(l, w + p * l.panel_bytes, 0, l.padded, parts.place(0, p));
            const size_t after = then ? size_t(at_once(left ? left : panels)) * l.panel_bytes : 0;
            multiply_panels(tiles, l.padded, wide ? w : scratch, wide ? l.panel_bytes : parts.stride(), count, x, 0,
                            out, Ahead(then, after, steps));
        }
        for (int p = 0; p < count; ++p)
            apply_factor<Scales, scaled>(w + p * l.panel_bytes + l.code_bytes, out + p * out_stride, x.tokens);
    }
}

// Scratch of multiply_tiles: three panels in bfloat16, in whole parts, unless the format is bfloat16.
inline size_t tile_scratch_bytes(const Layout& l, bool rounded) {
    if (l.format == Format::kBf16) return 0;
    const size_t panels = kTilePanels * size_t(round_up(l.padded, part_columns(l, true))) * 32;
    const size_t block = block_scratch_bytes(l);
    return !rounded || block > panels ? block : panels;
}

// x is packed for tiles. next: see Kernels::matmul.
void multiply_tiles(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, uint8_t* scratch,
                    const uint8_t* next) {
    Tiles tiles;
    with_format(l.format, [&]<class Code, class Scales, Format>() {
        if (l.format != Format::kBf16 && !x.how.rounded)
            return each_block(x, l.padded, [&](const PackedBlock& block) {
                multiply_one_block<Code, Scales>(tiles, l, w, panels, block, out, scratch, next);
            });
        if constexpr (kScalesAlone<Scales> && !Scales::kFewBits)
            if (l.groups == 1) return multiply_threes<Code, Scales, false>(tiles, l, w, panels, x, out, scratch, next);
        multiply_threes<Code, Scales, true>(tiles, l, w, panels, x, out, scratch, next);
    });
}

// peak() for the tile unit: products on registers only, of `seed` and its negative alternately, so that sums stay
// small.
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
