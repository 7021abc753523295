// Which product runs, and the table of this instruction set's kernels.
#pragma once

inline bool expands(Format format, int tokens) { return format != Format::kBf16 && tokens >= kExpandFromTokens; }

int block_tokens(const Layout& l, int tokens) {
    if (by_tiles(l, tokens)) return kTileTokens;
    return l.format == Format::kBf16 || l.format == Format::kFp16 || expands(l.format, tokens) ? kMostPlain
                                                                                               : kMostScaled;
}

size_t expand_bytes(const Layout& l, int panels, int tokens) {
    const size_t panel_bytes = size_t(l.padded) * 32;
    if (by_tiles(l, tokens)) return l.format == Format::kBf16 ? 0 : 2 * panel_bytes;
    return expands(l.format, tokens) ? size_t(panels) * panel_bytes : 0;
}

void expand(const Layout& l, const uint8_t* w, void* out) {
    with_format(l.format,
                [&]<class Code, class Scales>() { expand_groups<Code, Scales>(l, w, 0, l.groups, (uint8_t*)out); });
}

void matmul(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, void* scratch) {
    if (in_tiles(x)) return multiply_tiles(l, w, panels, x, out, (uint8_t*)scratch);
    const XPair* pairs = (const XPair*)x.pairs;
    with_format(l.format, [&]<class Code, class Scales>() {
        if (!expands(l.format, x.tokens)) {
            constexpr int most = Scales::kScaled ? kMostScaled : kMostPlain;
            return run_panels<Code, Scales, most>(l, w, panels, pairs, x.sums, x.tokens, out);
        }
        Layout wide = l;
        wide.panel_bytes = size_t(l.padded) * 32;
        for (int i = 0; i < panels; ++i)
            expand_groups<Code, Scales>(l, w + i * l.panel_bytes, 0, l.groups,
                                        (uint8_t*)scratch + i * wide.panel_bytes);
        run_panels<Bf16Code, NoScale, kMostPlain>(wide, (const uint8_t*)scratch, panels, pairs, nullptr, x.tokens, out);
    });
}

constexpr Kernels kernels(const char* name) {
    return {name,     sizeof(XPair), kBlocking,     block_tokens,   pack,        matmul,       expand_bytes,
            expand,   activate,      clear_columns, accumulate,     sum_rows,    store_rows,   rms_norm_row,
            add_row,  gated_add_row, gate_row,      rotate_head,    route_row,   kQueryLine,   pack_query,
            attend,   merge_states,  finish_state,  pack_keys,      pack_values, softmax_tile, scale_and_add,
            convolve, scale_to,      delta_step,    gated_norm_row, peak,        read};
}
