// A pair of columns times a pair of activations, both bfloat16, by the AVX-512 BF16 dot product: products exact, sums
// float32 (subnormals count as zero).
#pragma once

constexpr bool kBf16Dot = true;

using Pair = U32;        // two bfloat16 of each row
using XPair = uint32_t;  // two bfloat16 of one token
using Broadcast = U32;

inline Broadcast broadcast(const XPair* x) { return set_u32(*x); }
inline F32 dot(F32 sum, Pair w, Broadcast x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)x.v)}; }
inline Pair from_bf16_pairs(U32 line) { return line; }
// Of values that bfloat16 holds exactly.
inline Pair from_values(F32 even, F32 odd) {
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, shr<16>(as_u32(even)).v, as_u32(odd).v)};
}
inline U32 bf16_words(Pair w) { return w; }
inline F32 even_values(Pair w) { return as_f32(shl<16>(w)); }
inline F32 odd_values(Pair w) { return as_f32(bit_and(w, set_u32(0xffff0000))); }
inline XPair make_xpair(uint16_t even, uint16_t odd) { return even | uint32_t(odd) << 16; }
