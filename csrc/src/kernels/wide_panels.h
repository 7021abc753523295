// Many tokens: two panels at a time are multiplied with all blocks of tokens, whose activations stay in L2 while the
// next pair of panels is prefetched into it. Weights are bfloat16, or rounded to it once for all tokens. Never: few
// tokens.
#pragma once

constexpr int kWidePanels = 2;
constexpr int kFetchLines = 16;  // lines of weights per step of the prefetch

// Multiplies bfloat16 panels with M tokens, both from a cache. Returns how far it prefetched.
template <int R, int M>
__attribute__((noinline)) Ahead wide_tile(int lines, const uint8_t* w, size_t panel_bytes, const void* x, float* out,
                                          size_t out_panel, Ahead ahead) {
    F32 total[R][M];
    Tile<Bf16Code, NoScale, R, M>::clear(total);
    const uint8_t* panel[R];
    unrolled<R>([&](auto r) { panel[r.value] = w + r.value * panel_bytes; });
    Lines<Bf16Code, R, M>::add(total, panel, 0, lines, x, [&](int line) __attribute__((always_inline)) {
        if (line % kFetchLines == 0) ahead.step();
    });
    unrolled<R>([&](auto r) {
        unrolled<M>([&](auto m) { store(out + r.value * out_panel + 16 * m.value, total[r.value][m.value]); });
    });
    return ahead;
}

// True if there are kernels for blocks of more than half of `most` tokens: many tokens are split into such blocks.
constexpr bool wide_fit(int most) {
    for (int tokens = kWideFromTokens; tokens < 20 * most; ++tokens)
        if (tokens / block_count(tokens, most) <= most / 2) return false;
    return true;
}

// Multiplies up to kWidePanels contiguous bfloat16 panels with all tokens. out: [panels][tokens][16].
template <int most>
void wide_panels(const uint8_t* w, int panels, const Packed& x, int padded, float* out, Ahead ahead) {
    static_assert(wide_fit(most));
    const size_t panel_bytes = size_t(padded) * 32, out_panel = size_t(x.tokens) * 16;
    each_block(x, padded, [&](const PackedBlock& block) {
        float* to = out + size_t(block.first) * 16;
        unrolled<most - most / 2>([&](auto i) {
            constexpr int M = most / 2 + 1 + i.value, R = rows_at_once(M, false) < 2 ? 1 : 2;
            if (block.size != M) return;
            const auto tile = [&]<int rows>(Index<rows>, int p) {
                ahead = wide_tile<rows, M>(padded / 2, w + p * panel_bytes, panel_bytes, block.data, to + p * out_panel,
                                           out_panel, ahead);
            };
            int done = 0;
            for (; done + R <= panels; done += R) tile(Index<R>{}, done);
            if (done < panels) tile(Index<1>{}, done);
        });
    });
}

// Multiplies panels of layout `l` with all tokens. scaled: see expand_columns. expanded: room for kWidePanels panels of
// bfloat16. next: see Kernels::matmul.
template <class Code, class Scales, bool scaled>
void multiply_wide(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, uint8_t* expanded,
                   const uint8_t* next) {
    const bool plain = l.format == Format::kBf16;
    const int steps = block_count(x.tokens, x.how.block_tokens) * block_count(l.padded / 2, kFetchLines);
    for (int first = 0; first < panels; first += kWidePanels) {
        const int some = panels - first < kWidePanels ? panels - first : kWidePanels;
        const uint8_t* from = w + size_t(first) * l.panel_bytes;
        const uint8_t* then = first + some < panels ? from + size_t(some) * l.panel_bytes : next;
        for (int i = 0; i < some && !plain; ++i)
            expand_columns<Code, Scales, scaled>(l, from + i * l.panel_bytes, 0, l.padded,
                                                 expanded + size_t(i) * size_t(l.padded) * 32);
        float* sums = out + size_t(first) * size_t(x.tokens) * 16;
        wide_panels<kMostPlain>(plain ? from : expanded, some, x, l.padded, sums,
                                Ahead(then, then ? kWidePanels * l.panel_bytes : 0, steps));
        for (int i = 0; i < some; ++i)
            apply_factor<Scales, scaled>(from + i * l.panel_bytes + l.code_bytes,
                                         sums + size_t(i) * size_t(x.tokens) * 16, x.tokens);
    }
}
