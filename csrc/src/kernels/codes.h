// Decoding of codes (quantised or 16-bit values) to pairs of values, exactly. One struct per code: kValues columns per
// line of kBytes, load() a line, take pair p of it. Never: scales.
#pragma once

// A line that is decoded lane by lane.
template <int values>
struct WordLine {
    static constexpr int kValues = values, kBytes = 64;
    using Line = U32;
    static Line load(const uint8_t* p) { return load_u32(p); }
};

struct Bf16Code : WordLine<2> {
    template <int p>
    static Pair pair(U32 line) {
        return from_bf16_pairs(line);
    }
};

// A pair in float32, which float16 needs: multiplied with FMA, even if the instruction set has bfloat16 products.
struct WidePair {
    F32 even, odd;
};
inline F32 dot(F32 sum, const WidePair& w, Broadcast x) {
    return fma(w.odd, odd_values(x), fma(w.even, even_values(x), sum));
}
inline F32 even_values(const WidePair& w) { return w.even; }
inline F32 odd_values(const WidePair& w) { return w.odd; }

// Unlike other codes, a line holds the values of the 16 even columns before the 16 odd ones, for the conversion.
struct Fp16Code {
    static constexpr int kValues = 2, kBytes = 64;
    using Line = WidePair;
    static Line load(const uint8_t* p) { return {load_f16(p), load_f16(p + 32)}; }
    template <int p>
    static WidePair pair(const Line& line) {
        return line;
    }
};

// e4m3 (OCP 8-bit floating point): bias 7, subnormals, no infinities, NaN if all seven low bits are set. With shifted
// bits it is a float16 that is 2^8 too small, whose conversion handles subnormals at full speed.
inline F32 e4m3_lanes(U32 code) {
    const U32 size = bit_and(code, set_u32(0x7f));
    const U32 half = bit_or(shl<7>(size), shl<8>(bit_and(code, set_u32(0x80))));
    const F32 value = mul(f16_lanes(half), set(256.f));
    return as_f32(select(equal(size, set_u32(0x7f)), set_u32(0x7fc00000), as_u32(value)));
}

#ifdef PROA_BYTE_TABLES
// 8-bit codes whose bfloat16 is looked up byte by byte, indexed by their seven low bits; the sign is added separately.
struct ByteCode {
    static constexpr int kValues = 4, kBytes = 64;
    struct Line {
        Pair pairs[2];
    };
    static Line join(__m512i low, __m512i size, __m512i codes) {
        const __m512i high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi32(int(0x80808080)), 0xf8);
        constexpr __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
        return {{{_mm512_mask_blend_epi8(odd, low, _mm512_slli_epi16(high, 8))},
                 {_mm512_mask_blend_epi8(odd, _mm512_srli_epi16(low, 8), high)}}};
    }
    template <int p>
    static Pair pair(const Line& line) {
        return line.pairs[p];
    }
};

struct E4m3Code : ByteCode {
    static Line load(const uint8_t* p) {
        const __m512i codes = _mm512_loadu_si512(p);
        const ByteTables& t = kE4m3Tables;
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), codes, _mm512_load_si512(t.low + 64));
        const __m512i size = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), codes, _mm512_load_si512(t.high + 64));
        return join(low, size, codes);
    }
};

// The index is |q|; 128 and 0 both have index 0, so that entry holds 128, and a code of 0 is masked.
struct Int8Code : ByteCode {
    static Line load(const uint8_t* p) {
        const __m512i codes = _mm512_loadu_si512(p), index = _mm512_abs_epi8(codes);
        const __mmask64 some = _mm512_test_epi8_mask(codes, codes);
        const ByteTables& t = kInt8Tables;
        const __m512i low =
            _mm512_maskz_permutex2var_epi8(some, _mm512_load_si512(t.low), index, _mm512_load_si512(t.low + 64));
        const __m512i size =
            _mm512_maskz_permutex2var_epi8(some, _mm512_load_si512(t.high), index, _mm512_load_si512(t.high + 64));
        return join(low, size, codes);
    }
};
#else
struct E4m3Code : WordLine<4> {
    template <int p>
    static Pair pair(U32 line) {
        const U32 byte = set_u32(0xff);
        return from_values(e4m3_lanes(bit_and(shr<8 * p>(line), byte)),
                           e4m3_lanes(bit_and(shr<16 + 8 * p>(line), byte)));
    }
};

struct Int8Code : WordLine<4> {
    template <int p>
    static Pair pair(U32 line) {
        return from_values(to_f32(sar<24>(shl<24 - 8 * p>(line))), to_f32(sar<24>(shl<8 - 8 * p>(line))));
    }
};
#endif

// Four-bit codes by a table of 16 values, each exact in bfloat16.
template <class Values>
struct NibbleCode : WordLine<8> {
    static U32 load(const uint8_t* p) { return load_once(p); }
    template <int p>
    static Pair pair(U32 line) {
        if constexpr (kBf16Dot) {
            return Values::template words<4 * p>(line);
        } else {
            return from_values(Values::template value<4 * p>(line), Values::template value<16 + 4 * p>(line));
        }
    }
};

#ifdef PROA_BYTE_TABLES
// vpermw reads five bits of its index: the table is doubled, so that the extra bit is harmless.
struct alignas(64) WordTable {
    uint16_t words[32];
};
constexpr WordTable word_table(const float (&values)[16]) {
    WordTable t{};
    for (int i = 0; i < 32; ++i) t.words[i] = uint16_t(__builtin_bit_cast(uint32_t, values[i & 15]) >> 16);
    return t;
}
template <int shift>
inline Pair look_up_words(const WordTable& table, U32 line) {
    return {_mm512_permutexvar_epi16(shr<shift>(line).v, _mm512_load_si512(table.words))};
}

// Six-bit integers: vpermi2w reads exactly six bits of its index.
struct alignas(64) WideWordTable {
    uint16_t words[64];
};
constexpr WideWordTable wide_word_table(int zero_point) {
    WideWordTable t{};
    for (int i = 0; i < 64; ++i) t.words[i] = uint16_t(__builtin_bit_cast(uint32_t, float(i - zero_point)) >> 16);
    return t;
}
inline Pair look_up_words(const WideWordTable& table, U32 index) {
    const __m512i first = _mm512_load_si512(table.words), second = _mm512_load_si512(table.words + 32);
    return {_mm512_permutex2var_epi16(first, index.v, second)};
}
#endif

template <int zero_point>
struct IntegerNibble {
    template <int shift>
    static F32 value(U32 line) {
        const F32 q = to_f32(bit_and(shr<shift>(line), set_u32(15)));
        return zero_point ? sub(q, set(zero_point)) : q;
    }
#ifdef PROA_BYTE_TABLES
    static constexpr WordTable make() {
        float values[16];
        for (int i = 0; i < 16; ++i) values[i] = float(i - zero_point);
        return word_table(values);
    }
    static constexpr WordTable kWords = make();
    template <int shift>
    static Pair words(U32 line) {
        return look_up_words<shift>(kWords, line);
    }
#endif
};

struct E2m1Nibble {  // OCP microscaling formats: sign, two bits of exponent, one of fraction
    static constexpr float kValues[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                          -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
    template <int shift>
    static F32 value(U32 line) {
        return lookup(load_table(kValues), shr<shift>(line));
    }
#ifdef PROA_BYTE_TABLES
    static constexpr WordTable kWords = word_table(kValues);
    template <int shift>
    static Pair words(U32 line) {
        return look_up_words<shift>(kWords, line);
    }
#endif
};

// Six-bit codes: two lines of low nibbles, then one line of upper bit pairs; that of value i is at bit
// 16 (i % 2) + 2 (i / 2).
template <int zero_point>
struct SixCode {
    static constexpr int kValues = 16, kBytes = 192;
    struct Line {
        U32 low[2], high;
    };
    static Line load(const uint8_t* p) { return {{load_once(p), load_once(p + 64)}, load_once(p + 128)}; }
    template <int p>
    static Pair pair(const Line& line) {
        if constexpr (kBf16Dot) {
            return words<p>(line);
        } else {
            return from_values(value<4 * (p % 4), 2 * p>(line.low[p / 4], line.high),
                               value<16 + 4 * (p % 4), 16 + 2 * p>(line.low[p / 4], line.high));
        }
    }
#ifdef PROA_BYTE_TABLES
    static constexpr WideWordTable kWords = wide_word_table(zero_point);
    template <int p>
    static Pair words(const Line& line) {
        constexpr int up = 2 * p - 4;  // to bit 4 of each half
        const U32 high = up < 0 ? shl<(up < 0 ? -up : 0)>(line.high) : shr<(up < 0 ? 0 : up)>(line.high);
        return look_up_words(kWords, select(set_u32(0x000f000f), shr<4 * (p % 4)>(line.low[p / 4]), high));
    }
#endif
    template <int low_shift, int high_shift>
    static F32 value(U32 low, U32 high) {
        const U32 q =
            bit_or(bit_and(shr<low_shift>(low), set_u32(15)), shl<4>(bit_and(shr<high_shift>(high), set_u32(3))));
        return zero_point ? sub(to_f32(q), set(zero_point)) : to_f32(q);
    }
};
