// Products of a pair of columns with a pair of activations, both bfloat16, by the AVX-512 BF16 dot product: products
// are exact, sums float32 (subnormals count as zero).
#pragma once

constexpr bool kBf16Dot = true;

using Pair = U32;        // two bfloat16 of each row
using XPair = uint32_t;  // two bfloat16 of one token
using Broadcast = U32;

inline Broadcast broadcast(const XPair* x) { return set_u32(*x); }
inline F32 dot(F32 sum, Pair w, Broadcast x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)x.v)}; }
inline Pair from_bf16_pairs(U32 line) { return line; }
// The pair of values that are exact in bfloat16.
inline Pair from_values(F32 even, F32 odd) {
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, shr<16>(as_u32(even)).v, as_u32(odd).v)};
}
inline U32 bf16_words(Pair w) { return w; }
// Pairs of any values, rounded to nearest, ties to even.
inline U32 rounded_words(F32 even, F32 odd) {
    const __m512i sides = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
    alignas(64) static constexpr uint16_t kAlternate[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                            21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                            11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return {_mm512_permutexvar_epi16(_mm512_load_si512(kAlternate), sides)};
}
inline F32 even_values(Pair w) { return as_f32(shl<16>(w)); }
inline F32 odd_values(Pair w) { return as_f32(bit_and(w, set_u32(0xffff0000))); }
inline XPair make_xpair(uint16_t even, uint16_t odd) { return even | uint32_t(odd) << 16; }

// See dot_f32.h. Transposes 16 rows of 16 pairs, missing ones zero, by shuffles of pairs, then of twos, then of fours.
inline void interleave_pairs(const uint16_t* const* rows, int column, int count, int pairs, XPair* to, size_t step) {
    __m512i a[16], b[16];
    unrolled<16>([&](auto i) {
        a[i.value] = i.value < count ? _mm512_loadu_si512(rows[i.value] + column) : _mm512_setzero_si512();
    });
    unrolled<8>([&](auto i) {
        b[2 * i.value] = _mm512_unpacklo_epi32(a[2 * i.value], a[2 * i.value + 1]);
        b[2 * i.value + 1] = _mm512_unpackhi_epi32(a[2 * i.value], a[2 * i.value + 1]);
    });
    unrolled<8>([&](auto i) {
        constexpr int at = i.value / 2 * 4 + i.value % 2;
        a[2 * i.value] = _mm512_unpacklo_epi64(b[at], b[at + 2]);
        a[2 * i.value + 1] = _mm512_unpackhi_epi64(b[at], b[at + 2]);
    });  // a[4 i + j]: pairs j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3
    const __mmask16 some = __mmask16((1u << count) - 1);
    unrolled<4>([&](auto j) {
        const __m512i even_low = _mm512_shuffle_i32x4(a[j.value], a[4 + j.value], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(a[j.value], a[4 + j.value], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j.value], a[12 + j.value], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j.value], a[12 + j.value], 0xdd);
        const auto put = [&](int pair, __m512i x) {
            if (pair < pairs) _mm512_mask_storeu_epi32(to + size_t(pair) * step, some, x);
        };
        put(j.value, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        put(4 + j.value, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        put(8 + j.value, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
        put(12 + j.value, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    });
}
