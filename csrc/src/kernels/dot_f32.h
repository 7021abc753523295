// Products of a pair of columns with a pair of activations in float32: two fused multiply-adds.
#pragma once

constexpr bool kBf16Dot = false;

struct Pair {
    F32 even, odd;
};
struct XPair {
    float even, odd;
};
struct Broadcast {
    F32 even, odd;
};

inline Broadcast broadcast(const XPair* x) { return {set(x->even), set(x->odd)}; }
inline F32 dot(F32 sum, Pair w, Broadcast x) { return fma(w.odd, x.odd, fma(w.even, x.even, sum)); }
inline Pair from_bf16_pairs(U32 line) { return {as_f32(shl<16>(line)), as_f32(bit_and(line, set_u32(0xffff0000)))}; }
inline Pair from_values(F32 even, F32 odd) { return {even, odd}; }
// Pairs of values that are exact in bfloat16, as words.
inline U32 bf16_words(Pair w) { return bit_or(shr<16>(as_u32(w.even)), bit_and(as_u32(w.odd), set_u32(0xffff0000))); }
// Pairs of any values, rounded to nearest, ties away from zero, as words.
inline U32 rounded_words(F32 even, F32 odd) {
    const U32 half = set_u32(0x8000);
    return bit_or(shr<16>(add(as_u32(even), half)), bit_and(add(as_u32(odd), half), set_u32(0xffff0000)));
}
inline F32 even_values(Pair w) { return w.even; }
inline F32 odd_values(Pair w) { return w.odd; }
inline F32 even_values(Broadcast x) { return x.even; }
inline F32 odd_values(Broadcast x) { return x.odd; }
inline XPair make_xpair(uint16_t even, uint16_t odd) { return {bf16_value(even), bf16_value(odd)}; }

// Transposes the first `pairs` of 16 pairs, from `column` on, of `count` rows, at most 16: to[pair * step + row]. All
// 16 pairs must be readable.
inline void interleave_pairs(const uint16_t* const* rows, int column, int count, int pairs, XPair* to, size_t step) {
    for (int k = 0; k < pairs; ++k)
        for (int i = 0; i < count; ++i)
            to[size_t(k) * step + size_t(i)] = make_xpair(rows[i][column + 2 * k], rows[i][column + 2 * k + 1]);
}
