// A pair of columns times a pair of activations in float32: two fused multiply-adds.
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
// Of values that bfloat16 holds exactly.
inline U32 bf16_words(Pair w) { return bit_or(shr<16>(as_u32(w.even)), bit_and(as_u32(w.odd), set_u32(0xffff0000))); }
inline F32 even_values(Pair w) { return w.even; }
inline F32 odd_values(Pair w) { return w.odd; }
inline F32 even_values(Broadcast x) { return x.even; }
inline F32 odd_values(Broadcast x) { return x.odd; }
inline XPair make_xpair(uint16_t even, uint16_t odd) { return {bf16_value(even), bf16_value(odd)}; }
