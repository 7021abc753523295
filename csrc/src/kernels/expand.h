// Expands weights to bfloat16, in its layout: a line per two columns. Never: products.
#pragma once

// A group's weights times its scale, rounded once; exact if bfloat16 holds code times scale.
template <class Code, class Scales, bool with_factor>
struct ScaledGroup {
    static constexpr bool kExact = Scales::kFewBits && !(Scales::kHasFactor && with_factor);
    F32 scale = set(1.f), minimum = zero();

    ScaledGroup(const uint8_t* scales, int g) {
        if constexpr (Scales::kScaled) scale = Scales::scale(scales, g);
        if constexpr (Scales::kHasFactor && with_factor) scale = mul(scale, Scales::factor(scales));
        if constexpr (Scales::kHasMin) minimum = Scales::minimum(scales, g);
    }
    template <int p>
    U32 words(const typename Code::Line& line) const {
        const auto pair = Code::template pair<p>(line);
        const F32 even = even_values(pair), odd = odd_values(pair);
        if constexpr (kExact)
            return bf16_words(from_values(mul(even, scale), mul(odd, scale)));
        else
            return rounded_words(fma(even, scale, minimum), fma(odd, scale, minimum));
    }
};

// A faster version for some formats.
template <class Code, class Scales>
struct QuickGroup {
    static constexpr bool kThere = false;
};

#ifdef PROA_BYTE_TABLES
// e2m1 times a power of two: the table has the values times 2^125, and the scale lowers their exponent by a saturating
// subtraction. Only for the code of zero, whose entry is 0, is the difference below zero, and so becomes 0.
template <>
struct QuickGroup<NibbleCode<E2m1Nibble>, E8m0Rows> {
    static constexpr bool kThere = true;
    using Codes = NibbleCode<E2m1Nibble>;
    static constexpr int kRaised = 125;
    static constexpr WordTable kWords = [] {
        WordTable t = word_table(E2m1Nibble::kValues);
        for (uint16_t& word : t.words) word = word & 0x7fff ? uint16_t(word + (kRaised << 7)) : uint16_t(0);
        return t;
    }();
    __m512i lowered;

    // True if no row's scale overflows the exponent, is zero or NaN.
    static bool fits(const uint8_t* scales, int g) {
        const __m512i codes = load_u8(scales + 16 * g).v, one = _mm512_set1_epi32(1);
        return !_mm512_cmpge_epu32_mask(_mm512_sub_epi32(codes, one), _mm512_set1_epi32(127 + kRaised));
    }
    QuickGroup(const uint8_t* scales, int g) {
        const __m512i codes = load_u8(scales + 16 * g).v;
        const __m512i by = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127 + kRaised), codes), 7);
        lowered = _mm512_or_si512(by, _mm512_slli_epi32(by, 16));
    }
    template <int p>
    U32 words(U32 line) const {
        return {_mm512_subs_epu16(look_up_words<4 * p>(kWords, line).v, lowered)};
    }
};

// e4m3 times a scale that all rows share: tables of the rounded products, which are then looked up like codes without a
// scale. Making the tables takes 30 instructions a group; multiplying and rounding took 12 a line, of which a group of
// 128 columns has 32.
template <>
struct QuickGroup<E4m3Code, F32Panel> {
    static constexpr bool kThere = true;
    struct Codes {
        static constexpr int kValues = E4m3Code::kValues, kBytes = E4m3Code::kBytes;
        using Line = __m512i;
        static Line load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    };
    __m512i low[2], high[2];  // bytes of the products, by the code's seven low bits

    // True if a product has the sign of its code, which is added to what was looked up.
    static bool fits(const uint8_t* scales, int g) { return ((const float*)scales)[g] > 0; }

    QuickGroup(const uint8_t* scales, int g) {
        const F32 scale = F32Panel::scale(scales, g);
        const auto products = [&](int code) { return mul(scale, load(kE4m3Values.of + code)).v; };
        __m512i words[4];
        unrolled<4>([&](auto i) {
            words[i.value] = (__m512i)_mm512_cvtne2ps_pbh(products(32 * i.value + 16), products(32 * i.value));
        });
        const __m512i even = _mm512_load_si512(kEven), odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
        unrolled<2>([&](auto i) {
            low[i.value] = _mm512_permutex2var_epi8(words[2 * i.value], even, words[2 * i.value + 1]);
            high[i.value] = _mm512_permutex2var_epi8(words[2 * i.value], odd, words[2 * i.value + 1]);
        });
    }
    template <int p>
    U32 words(__m512i codes) const {
        return ByteCode::join(_mm512_permutex2var_epi8(low[0], codes, low[1]),
                              _mm512_permutex2var_epi8(high[0], codes, high[1]), codes)
            .pairs[p];
    }

  private:
    alignas(64) static constexpr uint8_t kEven[64] = {
        0,  2,  4,  6,  8,  10, 12,  14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38, 40, 42,
        44, 46, 48, 50, 52, 54, 56,  58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82, 84, 86,
        88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};
};
#endif

// The prefetch for each expanded line: nothing, or as many bytes of the next panels, in order.
struct NoFetch {
    void step(int) {}
};
struct InStep {
    const uint8_t* at;
    void step(int lines) {
        for (int i = 0; i < lines; ++i, at += kLineBytes) __builtin_prefetch(at, 0, 2);
    }
};

// Lines from `w` on.
template <class Code, class Group, class Fetch>
inline void expand_lines(const Group& group, const uint8_t* w, int lines, uint8_t* expanded, Fetch& fetch) {
    constexpr int kPairs = Code::kValues / 2;
    Fetch here = fetch;  // a local copy, which no store can alias
    for (int line = 0; line < lines; ++line, expanded += kPairs * 64) {
        const typename Code::Line codes = Code::load(w + size_t(line) * Code::kBytes);
        here.step(Code::kBytes / kLineBytes);
        unrolled<kPairs>([&](auto p) { store_u32(expanded + p.value * 64, group.template words<p.value>(codes)); });
    }
    fetch = here;
}

// Expands groups [first, last) of a panel. with_factor: include the factor of the whole panel, if there is one.
template <class Code, class Scales, bool with_factor = true, class Fetch = NoFetch>
inline void expand_groups(const Layout& l, const uint8_t* w, int first, int last, uint8_t* expanded,
                          Fetch&& fetch = {}) {
    using Quick = QuickGroup<Code, Scales>;
    const uint8_t* scales = w + l.code_bytes;
    const int lines = l.group / Code::kValues;
    for (int g = first; g < last; ++g, expanded += size_t(l.group) * 32) {
        const uint8_t* from = w + size_t(g) * lines * Code::kBytes;
        if constexpr (Quick::kThere && !(Scales::kHasFactor && with_factor)) {
            if (Quick::fits(scales, g)) {
                expand_lines<typename Quick::Codes>(Quick(scales, g), from, lines, expanded, fetch);
                continue;
            }
        }
        expand_lines<Code>(ScaledGroup<Code, Scales, with_factor>(scales, g), from, lines, expanded, fetch);
    }
}

// Expands codes without scales, exactly.
template <class Code>
struct PlainGroup {
    template <int p>
    U32 words(const typename Code::Line& line) const {
        return bf16_words(Code::template pair<p>(line));
    }
};

// Expands columns of a panel (whole groups if `scaled` and there are scales, whole lines in any case), without the
// factor that apply_factor multiplies the sums with: that of the whole panel or, unless `scaled`, each row's only
// scale.
template <class Code, class Scales, bool scaled, class Fetch = NoFetch>
inline void expand_columns(const Layout& l, const uint8_t* w, int first, int last, uint8_t* expanded,
                           Fetch&& fetch = {}) {
    const uint8_t* from = w + size_t(first / Code::kValues) * Code::kBytes;
    const int lines = (last - first) / Code::kValues;
    if constexpr (!Scales::kScaled)
        expand_lines<Code>(ScaledGroup<Code, Scales, false>(nullptr, 0), from, lines, expanded, fetch);
    else if constexpr (scaled)
        expand_groups<Code, Scales, false>(l, w, first / l.group, last / l.group, expanded, fetch);
    else
        expand_lines<Code>(PlainGroup<Code>{}, from, lines, expanded, fetch);
}

inline void scale_rows(F32 factor, float* out, int tokens) {
    for (int t = 0; t < tokens; ++t) store(out + t * 16, mul(factor, load(out + t * 16)));
}

// Multiplies a panel's sums by the factor that expand_columns left out.
template <class Scales, bool scaled>
inline void apply_factor(const uint8_t* scales, float* out, int tokens) {
    if constexpr (Scales::kHasFactor) scale_rows(Scales::factor(scales), out, tokens);
    if constexpr (Scales::kScaled && !scaled) scale_rows(Scales::scale(scales, 0), out, tokens);
}
