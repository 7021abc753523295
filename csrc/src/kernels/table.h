// Which product runs, and the table of this instruction set's kernels.
#pragma once

// Many tokens: see wide_panels.h; tiles leave none.
inline bool is_wide(int tokens) { return tokens >= kWideFromTokens; }

Packing packing(const Layout& l, int tokens) {
    if (by_digits(l, tokens)) return digit_packing(l);
    if (by_tiles(l, tokens)) return {kTileTokens, Packing::kTiles, 0, 1, tokens <= kTileTokens};
    if (is_wide(tokens)) return {kMostPlain, Packing::kPairs, 0, 1, kTiles};
    return {most_pairs(l.format), Packing::kPairs, 0, 1};
}

size_t row_bytes(const Layout& l) {
    const size_t pairs = size_t(l.padded / 2) * sizeof(XPair), lines = size_t(l.padded / kDigitColumns) * kLineBytes;
    return by_digits(l, 1) && lines > pairs ? lines : pairs;
}

size_t expand_bytes(const Layout& l, int tokens) {
    const size_t panel_bytes = size_t(l.padded) * 32;
    if (by_digits(l, tokens)) return 0;
    if (by_tiles(l, tokens)) return tile_scratch_bytes(l, tokens);
    return is_wide(tokens) && l.format != Format::kBf16 ? kWidePanels * panel_bytes : 0;
}

// Tokens of the smallest block of pairs: fewer go by digits, and several blocks are about as large.
constexpr int least_pairs(Format f) {
    const int least = digit_tokens(f) + 1, half = most_pairs(f) / 2;
    return least < half || half == 0 ? least : half;
}

// Whether there are kernels for all blocks of pairs that packing() makes.
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
            if (is_wide(x.tokens)) {
                if constexpr (kScalesAlone<Scales>)
                    if (l.groups == 1)
                        return multiply_wide<Code, Scales, false>(l, w, panels, x, out, (uint8_t*)scratch, next);
                return multiply_wide<Code, Scales, true>(l, w, panels, x, out, (uint8_t*)scratch, next);
            }
        run_panels<Code, Scales, least_pairs(format), most_pairs(format)>(l, w, panels, x, out, next);
    });
}

constexpr Kernels kernels(const char* name) {
    return {name,         kBlocking,    packing,      row_bytes,      pack,         matmul,
            expand_bytes, expand,       activate,     clear_columns,  accumulate,   sum_rows,
            store_rows,   rms_norm_row, add_row,      gated_add_row,  gate_row,     rotate_head,
            route_row,    kQueryLine,   pack_query,   attend,         merge_states, finish_state,
            pack_keys,    pack_values,  softmax_tile, scale_and_add,  to_e4m3,      from_e4m3,
            convolve,     scale_to,     delta_step,   gated_norm_row, peak,         read};
}
