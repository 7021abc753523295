// Selection of the product, and the table of this instruction set's kernels.
#pragma once

inline Packing pair_packing(const Layout& l) { return {most_pairs(l.format), Packing::kPairs, 0, 1}; }
inline Packing wide_packing() {
    Packing how{kMostPlain, Packing::kPairs, 0, 1, kTiles};
    how.wide = true;
    return how;
}
inline Packing tile_packing(bool rounded) {
    Packing how{kTileTokens, Packing::kTiles, 0, 1, !rounded};
    how.rounded = rounded;
    return how;
}

// True if there are enough tokens for wide_panels.h; with tiles, never.
inline bool is_wide(int tokens) { return tokens >= kWideFromTokens; }

// True if wide panels give the same bits as pairs: nothing is rounded, and scales are multiplied after the whole sum.
inline bool wide_is_exact(const Layout& l) {
    if (l.format == Format::kBf16) return true;
    bool exact = false;
    with_format(l.format, [&]<class Code, class Scales, Format>() {
        exact = kScalesAlone<Scales> && !Scales::kFewBits && l.groups == 1;
    });
    return exact;
}

template <Regime regime>
Packing packing(const Layout& l, int tokens) {
    if constexpr (regime == Regime::kDecode) return by_digits(l, 1) ? digit_packing(l) : pair_packing(l);
    if constexpr (regime == Regime::kPrompt) {
        if (kTiles) return tile_packing(true);
        return is_wide(tokens) && wide_is_exact(l) ? wide_packing() : pair_packing(l);
    }
    if (by_digits(l, tokens)) return digit_packing(l);
    if (by_tiles(l, tokens)) return tile_packing(tokens > kTileTokens);
    return is_wide(tokens) ? wide_packing() : pair_packing(l);
}

size_t row_bytes(const Layout& l) {
    const size_t pairs = size_t(l.padded / 2) * sizeof(XPair), lines = size_t(l.padded / kDigitColumns) * kLineBytes;
    return by_digits(l, 1) && lines > pairs ? lines : pairs;
}

template <Regime regime>
size_t expand_bytes(const Layout& l, int tokens) {
    const Packing how = packing<regime>(l, tokens);
    if (how.form == Packing::kTiles) return tile_scratch_bytes(l, how.rounded);
    return how.wide && l.format != Format::kBf16 ? kWidePanels * size_t(l.padded) * 32 : 0;
}

// Tokens of the smallest block of pairs: fewer tokens use digits, and several blocks have about equal sizes.
constexpr int least_pairs(Format f) {
    if (!kTiles) return 1;  // rows of prompts are always pairs, however few
    const int least = digit_tokens(f) + 1, half = most_pairs(f) / 2;
    return least < half || half == 0 ? least : half;
}

// True if there are kernels for all blocks of pairs that packing() makes.
constexpr bool pairs_fit(Format f) {
    for (int tokens = digit_tokens(f) + 1; tokens < pairs_below(f); ++tokens)
        if (tokens / block_count(tokens, most_pairs(f)) < least_pairs(f)) return false;
    return true;
}

void expand(const Layout& l, const uint8_t* w, void* out) {
    with_format(l.format, [&]<class Code, class Scales, Format>() {
        expand_groups<Code, Scales>(l, w, 0, l.groups, (uint8_t*)out);
    });
}

void matmul(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, void* scratch,
            const uint8_t* next) {
    if (x.how.form == Packing::kTiles) return multiply_tiles(l, w, panels, x, out, (uint8_t*)scratch, next);
    if (x.how.form != Packing::kPairs) return multiply_digits(l, w, panels, x, out, next);
    with_format(l.format, [&]<class Code, class Scales, Format format>() {
        static_assert(pairs_fit(format));
        if constexpr (!kTiles)
            if (x.how.wide) {
                if constexpr (kScalesAlone<Scales>)
                    if (l.groups == 1)
                        return multiply_wide<Code, Scales, false>(l, w, panels, x, out, (uint8_t*)scratch, next);
                return multiply_wide<Code, Scales, true>(l, w, panels, x, out, (uint8_t*)scratch, next);
            }
        run_panels<Code, Scales, least_pairs(format), most_pairs(format)>(l, w, panels, x, out, next);
    });
}

proa_format_kernels format_kernels(Format f) {
    return {digit_tokens(f), kTiles ? pairs_below(f) : 0, kTiles ? 0 : kWideFromTokens};
}

template <Regime regime>
constexpr Kernels kernels(const char* name) {
    return {name,          kBlocking,  format_kernels, packing<regime>,
            row_bytes,     pack,       matmul,         expand_bytes<regime>,
            expand,        activate,   clear_columns,  accumulate,
            sum_rows,      store_rows, rms_norm_row,   add_row,
            gated_add_row, gate_row,   rotate_head,    route_row,
            kQueryLine,    pack_query, attend,         merge_states,
            finish_state,  pack_keys,  pack_values,    softmax_tile,
            scale_and_add, to_e4m3,    from_e4m3,      convolve,
            scale_to,      delta_step, gated_norm_row, peak,
            read};
}
