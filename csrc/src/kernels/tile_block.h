// Products of one block of up to 32 tokens with panels of formats other than bfloat16, by matrix tiles: two panels at
// once, expanded part by part, one part ahead of the products, which read it from L1. Never: more tokens
// (tile_panels.h).
//
// Measured on one core of Granite Rapids, weights from RAM, 8 tokens; time per line relative to reading it: int8 and
// fp8 0.9 to 1.1, four bits 1.3 to 1.8 (decision 017). The next weights are prefetched line by line during expansion:
// with a few dozen lines at a time between products, int8 took 1.5.
#pragma once

// Number of tokens below which tiles are not used.
constexpr int pairs_below(Format f) { return f == Format::kFp16 ? kWideFromTokens : tiles_from_tokens(f); }
inline bool by_tiles(const Layout& l, int tokens) { return tokens >= pairs_below(l.format); }

// Most tokens of a block of pairs.
constexpr int most_pairs(Format f) { return is_plain(f) ? kMostPlain : tiles_from_tokens(f) - 1; }

constexpr int kBlockPanels = 2;

// Columns per part: whole tiles, and whole groups if each has its own scale. Longer parts are slower: two parts of this
// length take 4 KB per panel, and sums as much, which leaves room in L1 for other data.
constexpr int kPartColumns = 64;
inline int part_columns(const Layout& l, bool whole_groups) {
    int part = whole_groups ? l.group : kPartColumns;
    while (part < kPartColumns || part % kTileColumns) part += l.group;
    return part;
}

// Expands parts, and prefetches as many bytes of the next panels. slots: buffers of a panel that parts use in rotation.
template <class Code, class Scales, bool scaled>
struct Parts {
    const Layout& l;
    const uint8_t* w;
    int panels, columns, slots;
    uint8_t* memory;

    size_t stride() const { return size_t(slots * columns) * 32; }  // from one panel to the next
    int count() const { return block_count(l.padded, columns); }
    int steps(int i) const { return ((i + 1) * columns < l.padded ? columns : l.padded - i * columns) / kTileColumns; }
    uint8_t* place(int i, int p) const { return memory + p * stride() + size_t(i % slots * columns) * 32; }
    void expand(int i, InStep& ahead) const {
        if (i >= count()) return;
        const int scales = panels * int(l.scale_bytes / kLineBytes);
        ahead.step(block_begin(scales, count(), i + 1) - block_begin(scales, count(), i));
        for (int p = 0; p < panels; ++p)
            expand_columns<Code, Scales, scaled>(l, w + p * l.panel_bytes, i * columns,
                                                 i * columns + steps(i) * kTileColumns, place(i, p), ahead);
    }
};

// Multiplies one block while weights are expanded. Sums stay in the tiles to the end: scales are applied before
// (scaled), or afterwards (see apply_factor). Sums: TileSums, or the class behind one of its tables, so that the
// compiler can inline it.
template <class Sums, class Code, class Scales, bool scaled>
void multiply_parts(Tiles& tiles, const Sums& sums, const Parts<Code, Scales, scaled>& parts, const PackedBlock& x,
                    float* out, size_t out_stride, InStep ahead) {
    sums.clear(tiles);
    parts.expand(0, ahead);
    for (int i = 0; i < parts.count(); ++i) {
        parts.expand(i + 1, ahead);
        sums.add(tiles, parts.place(i, 0), parts.stride(), x, i * parts.columns / kTileColumns, parts.steps(i), {});
    }
    sums.store(tiles, x.size, out, out_stride);
}

// Sums of two groups, copied out of the tiles.
struct GroupSums {
    alignas(64) float of[2][kBlockPanels][kTileTokens * 16];
};

// Adds the sums of `count` groups from `first` on, times their scales, to out. of_x: see multiply_groups.
template <class Scales, int count>
inline void add_groups(const uint8_t* scales, int first, int tokens, const GroupSums& sums, int panel,
                       const float* of_x, float* out) {
    F32 scale[count], minimum[count];
    unrolled<count>([&](auto i) {
        scale[i.value] = Scales::scale(scales, first + i.value);
        if constexpr (Scales::kHasMin) minimum[i.value] = Scales::minimum(scales, first + i.value);
    });
    of_x += size_t(first) * size_t(tokens);
    for (int t = 0; t < tokens; ++t) {
        F32 total = first ? load(out + t * 16) : zero();
        unrolled<count>([&](auto i) {
            total = fma(scale[i.value], load(sums.of[i.value][panel] + t * 16), total);
            if constexpr (Scales::kHasMin) total = fma(minimum[i.value], set(of_x[i.value * tokens + t]), total);
        });
        store(out + t * 16, total);
    }
}

// True if groups are not whole tiles and so are multiplied by half tiles.
inline bool by_halves(const Layout& l) { return l.group % kTileColumns != 0; }

// Copies each group's sums out of the tiles; two groups' are scaled and added while the next are multiplied. of_x: sums
// of the activations per group, [groups][tokens], if there are minimums.
template <class Code, class Scales>
void multiply_groups(Tiles& tiles, const TileSums* const (&turns)[2], const Layout& l, const uint8_t* w,
                     const PackedBlock& x, const float* of_x, float* out, uint8_t* scratch, InStep ahead) {
    GroupSums sums[2];
    const int panels = turns[0]->panels, steps = l.group / (by_halves(l) ? kTileColumns / 2 : kTileColumns);
    const Parts<Code, Scales, false> parts{l, w, panels, part_columns(l, true), 2, scratch};
    const int per_part = parts.columns / l.group;
    const auto add = [&](int first) {
        const auto groups = first + 1 < l.groups ? add_groups<Scales, 2> : add_groups<Scales, 1>;
        for (int p = 0; p < panels; ++p)
            groups(w + p * l.panel_bytes + l.code_bytes, first, x.size, sums[first / 2 % 2], p, of_x,
                   out + size_t(p * x.size) * 16);
    };
    parts.expand(0, ahead);
    for (int g = 0; g < l.groups; ++g) {
        const int part = g / per_part;
        if (g % per_part == 0) parts.expand(part + 1, ahead);
        const TileSums& turn = *turns[g % 2];
        turn.clear(tiles);
        turn.add(tiles, parts.place(part, 0) + size_t(g % per_part * l.group) * 32, parts.stride(), x, g * steps, steps,
                 {});
        turn.store(tiles, x.size, sums[g / 2 % 2].of[g % 2][0], kTileTokens * 16);
        if (g && g % 2 == 0) add(g - 2);
    }
    add((l.groups - 1) / 2 * 2);
}

inline void group_sums(const Layout& l, const PackedBlock& x, float* out) {
    for (int g = 0; g < l.groups; ++g)
        for (int t = 0; t < x.size; ++t) *out++ = x.sum(g, l.group, t);
}

constexpr size_t parts_bytes(int columns) { return size_t(2 * kBlockPanels) * size_t(columns) * 32; }

// Scratch of multiply_one_block: parts, then sums of activations.
inline size_t block_scratch_bytes(const Layout& l) {
    return parts_bytes(part_columns(l, true)) + size_t(l.groups) * kTileTokens * sizeof(float);
}

// How scales are applied. bfloat16 holds every code exactly, and code times scale if the scale has few bits
// (microscaling formats, nvfp4): those are exact. Other scales are multiplied in float32 after each group's sum, which
// is exact too; or, with more than one block of tokens, rounded into the weights, because copying the sums of each
// group and token out of the tiles would then cost more. With groups of half tiles that is so from 17 tokens on.
template <class Code, class Scales>
void multiply_one_block(Tiles& tiles, const Layout& l, const uint8_t* w, int panels, const PackedBlock& x, float* out,
                        uint8_t* scratch, const uint8_t* next) {
    constexpr bool kBefore = !Scales::kScaled || Scales::kFewBits;
    const bool two_rows = x.size > kTileRows, one_scale = l.groups == 1 && !Scales::kHasMin;
    const bool after = !kBefore && !(by_halves(l) && two_rows), halves = after && by_halves(l);
    float* of_x = (float*)(scratch + parts_bytes(part_columns(l, true)));
    if (Scales::kHasMin && after) group_sums(l, x, of_x);
    const auto sums_in_turn = [&](int panels, int turn) {
        return two_rows ? &tile_sums(panels, true) : &tile_sums_in_turn(panels, halves, turn);
    };
    sums_in_turn(1, 0)->shape(tiles, x.size);
    const size_t out_stride = size_t(x.size) * 16;
    for (int count; panels; panels -= count, w += count * l.panel_bytes, out += count * out_stride) {
        count = panels < kBlockPanels ? panels : kBlockPanels;
        const TileSums* const turns[2] = {sums_in_turn(count, 0), sums_in_turn(count, 1)};
        const InStep ahead{panels > count ? w + count * l.panel_bytes : next ? next : w};
        const auto through = [&]<int times>(Index<times>) {
            constexpr bool scaled = times;
            const int columns = part_columns(l, scaled && Scales::kScaled);
            multiply_parts(tiles, *turns[0], Parts<Code, Scales, scaled>{l, w, count, columns, 2, scratch}, x, out,
                           out_stride, ahead);
            for (int p = 0; p < count; ++p)
                apply_factor<Scales, scaled>(w + p * l.panel_bytes + l.code_bytes, out + p * out_stride, x.size);
        };
        if constexpr (!kBefore) {
            if (after) {
                one_scale ? through(Index<0>{})
                          : multiply_groups<Code, Scales>(tiles, turns, l, w, x, of_x, out, scratch, ahead);
                continue;
            }
        }
        through(Index<1>{});
    }
}
