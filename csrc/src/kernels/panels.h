// Products of panels of weights with packed activations: the algorithm of all linear layers and experts. Never: which
// rows or tokens, threads.
//
// One sum per row and token, over the columns in order: a token's result does not depend on the other tokens of the
// batch.
#pragma once

// Prefetch distance from the current line: hardware prefetchers of x86 do not cross 4 KB pages, and cannot predict
// which panels come next. A prefetch of data that is never read would occupy one of a core's few line-fill buffers.
constexpr size_t kAheadBytes = 8192;  // for a tile's panels together: bandwidth times latency of memory

// Prefetches memory that is needed soon into L2, evenly spread over other work: many prefetches at once would fill the
// core's line-fill buffers, and the work would stall.
struct Ahead {
    const uint8_t *at, *end;
    int rate, due = 0;  // lines per step, in sixteenths

    Ahead(const uint8_t* from, size_t bytes, int steps)
        : at(from), end(from + bytes), rate(int((bytes / kLineBytes * 16 + size_t(steps) - 1) / size_t(steps))) {}
    static Ahead nothing() { return {nullptr, 0, 1}; }
    void step() {
        for (due += rate; due >= 16 && at < end; due -= 16, at += kLineBytes) __builtin_prefetch(at, 0, 2);
    }
};

// Codes that are multiplied as integers: see digit_panels.h.
template <class Code>
constexpr bool kInteger = requires { Code::kZero; };

template <class Code>
constexpr int code_bits = Code::kBytes / (2 * Code::kValues);  // of 16 rows

// The prefetch that accompanies a line of R panels: each panel `ahead` bytes further on; or, for instruction sets that
// gain from it, the next panels in memory order from `then` on, one line per line of these: several panels in parallel
// are several streams, and memory is read faster in order (decision 012). then: the first of the current panels if
// nothing comes next.
template <class Code, int R>
struct Fetch {
    ptrdiff_t ahead;
    const uint8_t* then;

    inline __attribute__((always_inline)) void line(const uint8_t* const (&w)[R], int line) const {
        unrolled<R>([&](auto r) __attribute__((always_inline)) {
            const uint8_t* p = w[r.value] + size_t(line) * Code::kBytes + ahead;
            for (int i = 0; i < Code::kBytes; i += 64) __builtin_prefetch(p + i);
        });
        if constexpr (fetches_in_order(code_bits<Code>, kInteger<Code>)) {
            const uint8_t* p = then + size_t(line) * R * Code::kBytes;
            for (int i = 0; i < R * Code::kBytes; i += 64) __builtin_prefetch(p + i, 0, 2);
        }
    }
};

// Adds the products of lines [first, last) of panels w[0..R-1] to the sums of M tokens. x: pairs.
template <class Code, int R, int M>
struct Lines {
    static constexpr int kPairs = Code::kValues / 2;

    static inline __attribute__((always_inline)) void add(F32 (&sum)[R][M], const uint8_t* const (&w)[R], int first,
                                                          int last, const Fetch<Code, R>& fetch, const void* x) {
        add(sum, w, first, last, x, [&](int line) __attribute__((always_inline)) { fetch.line(w, line); });
    }

    // fetch(line): prefetches what is read later.
    template <class F>
    static inline __attribute__((always_inline)) void add(F32 (&sum)[R][M], const uint8_t* const (&w)[R], int first,
                                                          int last, const void* x, F&& fetch) {
        for (int line = first; line < last; ++line) {
            typename Code::Line codes[R];
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                codes[r.value] = Code::load(w[r.value] + size_t(line) * Code::kBytes);
            });
            fetch(line);
            const XPair* at = (const XPair*)x + size_t(line) * kPairs * M;
            unrolled<kPairs>([&](auto p) __attribute__((always_inline)) {
                decltype(Code::template pair<p.value>(codes[0])) pairs[R];
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    pairs[r.value] = Code::template pair<p.value>(codes[r.value]);
                });
                unrolled<M>([&](auto m) __attribute__((always_inline)) {
                    const Broadcast token = broadcast(at + p.value * M + m.value);
                    unrolled<R>([&](auto r) __attribute__((always_inline)) {
                        sum[r.value][m.value] = dot(sum[r.value][m.value], pairs[r.value], token);
                    });
                });
            });
        }
    }
};

// Multiplies panels w[0..R-1] with M tokens. sums: sums of the activations over 16 columns each, [padded / 16][M].
template <class Code, class Scales, int R, int M>
struct Tile {
    static inline __attribute__((always_inline)) void clear(F32 (&sum)[R][M]) {
        unrolled<R>([&](auto r) { unrolled<M>([&](auto m) { sum[r.value][m.value] = zero(); }); });
    }

    // after: offset from each panel to the one that is multiplied after it; 0: none.
    static __attribute__((noinline)) void run(const Layout& l, const uint8_t* const (&w)[R], const void* x,
                                              const float* sums, float* const (&out)[R], ptrdiff_t after) {
        using Terms = Lines<Code, R, M>;
        constexpr ptrdiff_t kPrefetchBytes = kAheadBytes / R;
        F32 total[R][M];
        clear(total);
        const int all = l.padded / Code::kValues;
        // Near the panel's end, prefetch the codes of the next panel, or the current line if there is none.
        const int inside = all - int(kPrefetchBytes / Code::kBytes), border = inside > 0 ? inside : 0;
        const ptrdiff_t next = after ? after - ptrdiff_t(l.code_bytes) + kPrefetchBytes : 0;
        const Fetch<Code, R> here{kPrefetchBytes, w[0] + after}, beyond{next, w[0] + after};
        if constexpr (!Scales::kScaled) {
            Terms::add(total, w, 0, border, here, x);
            Terms::add(total, w, border, all, beyond, x);
        } else {
            unrolled<R>([&](auto r) { __builtin_prefetch(w[r.value] + after + l.code_bytes); });
            const int group_lines = l.group / Code::kValues;
            for (int g = 0; g < l.groups; ++g) {
                F32 part[R][M];
                clear(part);
                for (int first = g * group_lines, end = first + group_lines; first < end;) {
                    const int last = first < border && border < end ? border : end;
                    Terms::add(part, w, first, last, first < border ? here : beyond, x);
                    first = last;
                }
                float of_x[M];  // sums of the activations in this group
                if constexpr (Scales::kHasMin) sum_groups(l.group / 16, sums + size_t(g) * (l.group / 16) * M, of_x);
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    const F32 s = Scales::scale(w[r.value] + l.code_bytes, g);
                    unrolled<M>([&](auto m) __attribute__((always_inline)) {
                        total[r.value][m.value] = fma(s, part[r.value][m.value], total[r.value][m.value]);
                    });
                    if constexpr (Scales::kHasMin) {
                        const F32 minimum = Scales::minimum(w[r.value] + l.code_bytes, g);
                        unrolled<M>([&](auto m) __attribute__((always_inline)) {
                            total[r.value][m.value] = fma(minimum, set(of_x[m.value]), total[r.value][m.value]);
                        });
                    }
                });
            }
        }
        unrolled<R>([&](auto r) {
            F32 factor = set(1.f);
            if constexpr (Scales::kHasFactor) factor = Scales::factor(w[r.value] + l.code_bytes);
            unrolled<M>([&](auto m) {
                F32& sum = total[r.value][m.value];
                if constexpr (Scales::kHasFactor) sum = mul(sum, factor);
                store(out[r.value] + 16 * m.value, sum);
            });
        });
    }

    static inline __attribute__((always_inline)) void sum_groups(int sixteens, const float* sums, float (&of_x)[M]) {
        for (int m = 0; m < M; ++m) of_x[m] = sums[m];
        for (int i = 1; i < sixteens; ++i)
            for (int m = 0; m < M; ++m) of_x[m] += sums[i * M + m];
    }
};

// Multiplies panels [first, panels) R at a time, while R are left; with `all`, the last one is repeated in place of
// missing ones. Returns the first panel that was not multiplied. next: see Kernels::matmul.
template <class Code, class Scales, int R, int M, bool all>
int run_rows(const Layout& l, const uint8_t* w, int first, int panels, const PackedBlock& x, float* out, int out_tokens,
             const uint8_t* next) {
    for (; first + (all ? 1 : R) <= panels; first += R) {
        const uint8_t* panel[R];
        float* place[R];
        for (int r = 0; r < R; ++r) {
            const int at = !all || first + r < panels ? first + r : panels - 1;
            panel[r] = w + size_t(at) * l.panel_bytes;
            place[r] = out + size_t(at) * out_tokens * 16;
        }
        ptrdiff_t after = R * ptrdiff_t(l.panel_bytes);
        if (first + R >= panels) after = next ? next - panel[0] : 0;
        Tile<Code, Scales, R, M>::run(l, panel, x.data, x.sums, place, after);
    }
    return first;
}

// Multiplies all panels with one block of M tokens. out: [panels][out_tokens][16], this block's first token at out.
// A single panel has no kernel of its own: it is rare, and its kernels would be a third of the compiled code.
template <class Code, class Scales, int M>
void run_block(const Layout& l, const uint8_t* w, int panels, const PackedBlock& x, float* out, int out_tokens,
               const uint8_t* next) {
    constexpr int R = kInteger<Code> ? digit_rows_at_once(M) : rows_at_once(M, Scales::kScaled);
    int done = 0;
    if constexpr (R > 2) done = run_rows<Code, Scales, R, M, false>(l, w, 0, panels, x, out, out_tokens, next);
    run_rows<Code, Scales, (R > 2 ? 2 : R), M, true>(l, w, done, panels, x, out, out_tokens, next);
}

constexpr int kPanelsKept = 4;  // panels kept in a core's cache while several blocks of tokens are multiplied with them

// Blocks have `least` to `most` tokens.
template <class Code, class Scales, int least, int most>
void run_panels(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, const uint8_t* next) {
    const int step = x.tokens > x.how.block_tokens ? kPanelsKept : panels;
    for (int first = 0; first < panels; first += step) {
        const int some = panels - first < step ? panels - first : step;
        const uint8_t* from = w + size_t(first) * l.panel_bytes;
        const uint8_t* after = first + some < panels ? from + size_t(some) * l.panel_bytes : next;
        each_block(x, l.padded, [&](const PackedBlock& block) {
            const uint8_t* then = block.first + block.size < x.tokens ? from : after;
            float* to = out + (size_t(first) * size_t(x.tokens) + size_t(block.first)) * 16;
            unrolled<most - least + 1>([&](auto i) {
                constexpr int M = i.value + least;
                if (block.size == M) run_block<Code, Scales, M>(l, from, some, block, to, x.tokens, then);
            });
        });
    }
}
