// Panels of weights times packed activations by matrix tiles: 16 lines of a bfloat16 panel are an operand as they lie,
// 16 tokens by 32 columns the other. Other formats are expanded to bfloat16 first, two panels at a time. Never: few
// tokens, which panels.h does better.
//
// Measured on Emerald Rapids: with weights and activations in L2, tiles come at 50 bytes a cycle, and this loop reaches
// 60 to 65 % of what the unit does on registers; with all in L1, 80 %. Blocks of columns, so that either operand stays
// in L1, gain nothing: the sums, stored and loaded again for each, cost as much.
#pragma once

// Memory that is needed soon, fetched into L2 in equal parts while tiles are multiplied.
struct Ahead {
    const uint8_t *at, *end;
    int lines;  // of a step

    Ahead(const uint8_t* from, size_t bytes, int steps)
        : at(from), end(from + bytes), lines(int((bytes / kLineBytes + size_t(steps) - 1) / size_t(steps))) {}
    void step() {
        for (int i = 0; i < lines && at < end; ++i, at += kLineBytes) __builtin_prefetch(at, 0, 2);
    }
};

// Two panels (or one) times one block of up to 32 tokens. x: its lines; out0, out1: [tokens][16].
template <bool two_panels, bool two_rows>
void multiply_block(Tiles& tiles, int padded, const uint8_t* w0, const uint8_t* w1, const uint8_t* x, int tokens,
                    float* out0, float* out1, Ahead& fetched) {
    Ahead ahead = fetched;
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
}

// One panel in bfloat16, or two `stride` bytes apart, times all tokens. out: [panels][tokens][16].
inline void multiply_panels(Tiles& tiles, int padded, const uint8_t* w, size_t stride, int panels, const Packed& x,
                            float* out, Ahead ahead) {
    const uint8_t* w1 = w + stride;
    int shaped = 0;  // for blocks of this size
    each_block(x, padded, [&](const PackedBlock& block) {
        const int size = block.size;
        const bool two_rows = size > kTileRows;
        if (size != shaped) tiles.shape(two_rows ? kTileRows : size, two_rows ? size - kTileRows : 1), shaped = size;
        float *out0 = out + size_t(block.first) * 16, *out1 = out0 + size_t(x.tokens) * 16;
        const auto run = [&](auto multiply) {
            multiply(tiles, padded, w, w1, block.line(0, 0), size, out0, out1, ahead);
        };
        if (panels == 2) return two_rows ? run(multiply_block<true, true>) : run(multiply_block<true, false>);
        two_rows ? run(multiply_block<false, true>) : run(multiply_block<false, false>);
    });
}

// How scales are taken into account. bfloat16 holds every code exactly, and a code times its scale where the scale has
// few bits (microscaling formats, nvfp4): those are exact. Others' scales are multiplied in float32 after each group's
// sum, which is exact too, or, for many tokens, rounded into the weights: a group's sums, taken out of the tiles for
// each token, then cost more than that.
constexpr int kScaleAfterBelow = 32;  // tokens

inline bool exact_before(Format f) { return f == Format::kNvfp4 || f == Format::kMxfp4 || f == Format::kMxfp8; }
inline bool exact_after(const Layout& l) { return l.format != Format::kFp16 && l.group % kTileColumns == 0; }
inline bool scale_after(const Layout& l, int tokens) {
    return exact_after(l) && !exact_before(l.format) && (l.groups == 1 || tokens < kScaleAfterBelow);
}

inline bool by_tiles(const Layout& l, int tokens) {
    return tokens >= (exact_before(l.format) || exact_after(l) ? kTilesFromTokens : kExpandFromTokens);
}

// One panel of codes, `w`, times one block. Sums of four groups, or of two for more than 16 tokens, are taken out of
// the tiles together. out: [tokens][16].
template <class Scales, bool two_rows>
void multiply_groups(Tiles& tiles, const Layout& l, const uint8_t* w, const uint8_t* scales, const PackedBlock& block,
                     float* out, Ahead& fetched) {
    constexpr int kAtOnce = two_rows ? 2 : 4;
    alignas(64) float sums[4][kTileRows * 16];
    Ahead ahead = fetched;
    const int steps = l.group / kTileColumns, size = block.size;
    for (int first = 0; first < l.groups; first += kAtOnce) {
        F32 scale[kAtOnce], minimum[kAtOnce];
        unrolled<kAtOnce>([&](auto i) {
            const int g = first + i.value;
            scale[i.value] = minimum[i.value] = zero();
            tiles.zero<i.value>();
            if constexpr (two_rows) tiles.zero<i.value + 2>();
            for (int k = g * steps; g < l.groups && k < (g + 1) * steps; ++k) {
                tiles.load<6 + i.value % 2>(w + size_t(k) * kTileBytes);
                tiles.load<4>(block.line(k, 0));
                tiles.multiply<i.value, 4, 6 + i.value % 2>();
                if constexpr (two_rows) tiles.load<5>(block.line(k, kTileRows));
                if constexpr (two_rows) tiles.multiply<i.value + 2, 5, 6 + i.value % 2>();
                ahead.step();
            }
            tiles.store<i.value>(sums[i.value]);
            if constexpr (two_rows) tiles.store<i.value + 2>(sums[i.value + 2]);
            if (g >= l.groups) return;
            scale[i.value] = Scales::scale(scales, g);
            if constexpr (Scales::kHasMin) minimum[i.value] = Scales::minimum(scales, g);
        });
        for (int t = 0; t < size; ++t) {
            F32 total = first ? load(out + t * 16) : zero();
            unrolled<kAtOnce>([&](auto i) {
                const float* sum = two_rows && t >= kTileRows ? sums[i.value + 2] - kTileRows * 16 : sums[i.value];
                total = fma(scale[i.value], load(sum + t * 16), total);
                if constexpr (Scales::kHasMin)
                    if (first + i.value < l.groups)
                        total = fma(minimum[i.value], set(block.sum(first + i.value, l.group, t)), total);
            });
            store(out + t * 16, total);
        }
    }
    fetched = ahead;
}

// All blocks times one panel of codes.
template <class Scales>
void multiply_codes(Tiles& tiles, const Layout& l, const uint8_t* w, const uint8_t* scales, const Packed& x, float* out,
                    Ahead ahead) {
    each_block(x, l.padded, [&](const PackedBlock& block) {
        const bool two_rows = block.size > kTileRows;
        tiles.shape(two_rows ? kTileRows : block.size, two_rows ? block.size - kTileRows : block.size);
        float* to = out + size_t(block.first) * 16;
        two_rows ? multiply_groups<Scales, true>(tiles, l, w, scales, block, to, ahead)
                 : multiply_groups<Scales, false>(tiles, l, w, scales, block, to, ahead);
    });
}

inline void scale_rows(F32 factor, float* out, int tokens) {
    for (int t = 0; t < tokens; ++t) store(out + t * 16, mul(factor, load(out + t * 16)));
}

// One or two panels whose scales are multiplied before the products, or are none. scratch: two panels in bfloat16.
template <class Code, class Scales>
void multiply_scaled(Tiles& tiles, const Layout& l, const uint8_t* here, int count, const Packed& x, float* out,
                     uint8_t* scratch, const Ahead& ahead) {
    const size_t stride = size_t(l.padded) * 32;
    for (int p = 0; p < count; ++p)
        expand_panel<Code, Scales, false>(l, here + p * l.panel_bytes, scratch + p * stride);
    multiply_panels(tiles, l.padded, scratch, stride, count, x, out, ahead);
    if constexpr (Scales::kHasFactor)
        for (int p = 0; p < count; ++p)
            scale_rows(Scales::factor(here + p * l.panel_bytes + l.code_bytes), out + size_t(p) * x.tokens * 16,
                       x.tokens);
}

// The same with scales that are multiplied after the products.
template <class Code, class Scales>
void multiply_unscaled(Tiles& tiles, const Layout& l, const uint8_t* here, int count, const Packed& x, float* out,
                       uint8_t* scratch, const Ahead& ahead) {
    const size_t stride = size_t(l.padded) * 32;
    const bool one_scale = l.groups == 1 && !Scales::kHasMin;  // of each row: sums may stay in the tiles to the end
    for (int p = 0; p < count; ++p) expand_codes<Code>(l, here + p * l.panel_bytes, scratch + p * stride);
    if (one_scale) multiply_panels(tiles, l.padded, scratch, stride, count, x, out, ahead);
    for (int p = 0; p < count; ++p) {
        const uint8_t* scales = here + p * l.panel_bytes + l.code_bytes;
        float* to = out + size_t(p) * x.tokens * 16;
        if (one_scale)
            scale_rows(Scales::scale(scales, 0), to, x.tokens);
        else
            multiply_codes<Scales>(tiles, l, scratch + p * stride, scales, x, to, ahead);
    }
}

// scratch: two panels in bfloat16, if the format is another. x is in tiles.
void multiply_tiles(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, uint8_t* scratch) {
    Tiles tiles;
    const int steps = block_count(x.tokens, x.block_tokens) * (l.padded / kTileColumns);
    for (int i = 0; i < panels; i += 2) {
        const uint8_t* here = w + size_t(i) * l.panel_bytes;
        const int count = panels - i < 2 ? 1 : 2, next = panels - i - count < 2 ? panels - i - count : 2;
        float* to = out + size_t(i) * x.tokens * 16;
        const Ahead ahead(here + count * l.panel_bytes, size_t(next) * l.panel_bytes, steps);
        if (l.format == Format::kBf16) {
            multiply_panels(tiles, l.padded, here, l.panel_bytes, count, x, to, ahead);
            continue;
        }
        with_format(l.format, [&]<class Code, class Scales>() {
            if constexpr (Scales::kScaled)
                if (scale_after(l, x.tokens))
                    return multiply_unscaled<Code, Scales>(tiles, l, here, count, x, to, scratch, ahead);
            multiply_scaled<Code, Scales>(tiles, l, here, count, x, to, scratch, ahead);
        });
    }
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
