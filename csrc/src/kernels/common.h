// Functions that all kernels of one instruction set share, on the vectors of vec_*.h. Never: formats.
#pragma once

template <int i>
struct Index {
    static constexpr int value = i;
};
template <int n, class F>
inline __attribute__((always_inline)) void unrolled(F&& f) {
    if constexpr (n > 0) {
        unrolled<n - 1>(f);
        f(Index<n - 1>{});
    }
}

inline F32 load_bf16(const void* p) { return as_f32(shl<16>(load_u16(p))); }

// Loads the first n bfloat16, 0 to 16; the other lanes are zero, and nothing beyond p[n - 1] is read.
inline F32 load_bf16_first(const uint16_t* p, int n) {
    if (n >= 16) return load_bf16(p);
    uint16_t all[16] = {};
    for (int i = 0; i < n; ++i) all[i] = p[i];
    return load_bf16(all);
}
// Rounds to bfloat16, in the low halves of the lanes: to nearest, ties to even; NaN propagates.
inline U32 bf16_bits(F32 x) {
    const U32 bits = as_u32(x), odd = bit_and(shr<16>(bits), set_u32(1));
    const U32 rounded = shr<16>(add(add(bits, set_u32(0x7fff)), odd));
    const U32 is_nan = sar<31>(add(bit_and(bits, set_u32(0x7fffffff)), set_u32(0x007fffff)));
    return select(is_nan, bit_or(shr<16>(bits), set_u32(0x40)), rounded);
}
inline void store_bf16(void* p, F32 x) { store_u16(p, bf16_bits(x)); }

inline float bf16_value(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
inline uint16_t to_bf16(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e^x within 2 units of the last place; 0 below -87.3 and at most e^88.3 (x = n ln 2 + r, a polynomial in r).
inline F32 exp(F32 x) {
    const F32 held = max(set(-87.3f), min(set(88.3f), x));  // in this order NaN stays NaN
    const F32 n = round_even(mul(held, set(1.44269504f)));
    F32 r = fma(n, set(-0.693359375f), held);
    r = fma(n, set(2.12194440e-4f), r);
    F32 p = set(1.f / 5040);
    p = fma(p, r, set(1.f / 720));
    p = fma(p, r, set(1.f / 120));
    p = fma(p, r, set(1.f / 24));
    p = fma(p, r, set(1.f / 6));
    p = fma(p, r, set(0.5f));
    p = fma(p, r, set(1.f));
    p = fma(p, r, set(1.f));
    const F32 scaled = as_f32(add(as_u32(p), shl<23>(to_i32(n))));
    return select_greater(set(-87.3f), x, zero(), scaled);
}
inline F32 sigmoid(F32 x) { return div(set(1.f), add(set(1.f), exp(sub(zero(), x)))); }
