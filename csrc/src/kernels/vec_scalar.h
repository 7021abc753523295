// 16 lanes of 32 bits in plain C++: the readable reference of vec_avx512.h, and the fallback for every other CPU.
#pragma once

struct F32 {
    float v[16];
};
struct U32 {
    uint32_t v[16];
};

template <class T, class F>
inline T lanes(F f) {
    T out;
    for (int i = 0; i < 16; ++i) out.v[i] = f(i);
    return out;
}

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline F32 set(float x) {
    return lanes<F32>([&](int) { return x; });
}
constexpr int kVectorRegisters = 4;  // in units of 16 lanes

inline F32 zero() { return set(0.f); }
inline F32 load(const float* p) {
    return lanes<F32>([&](int i) { return p[i]; });
}
inline void store(float* p, F32 x) { __builtin_memcpy(p, x.v, sizeof x.v); }
inline F32 add(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] + y.v[i]; });
}
inline F32 sub(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] - y.v[i]; });
}
inline F32 mul(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] * y.v[i]; });
}
inline F32 div(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] / y.v[i]; });
}
inline F32 max(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
inline F32 min(F32 x, F32 y) {
    return lanes<F32>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
}
// Rounds product and sum separately: without an FMA unit, std::fma is a slow library call.
inline F32 fma(F32 x, F32 y, F32 z) {
    return lanes<F32>([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
}
inline F32 round_even(F32 x) {  // of |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction
    return lanes<F32>([&](int i) {
        volatile float shifted = x.v[i] + 12582912.f;
        return shifted - 12582912.f;
    });
}
inline float reduce_add(F32 x) {  // by halves, as the vector units do
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
    return x.v[0];
}
// out[i] = the sum of the lanes of argument i.
inline void reduce_add4(F32 w, F32 x, F32 y, F32 z, float* out) {
    out[0] = reduce_add(w), out[1] = reduce_add(x), out[2] = reduce_add(y), out[3] = reduce_add(z);
}
inline float reduce_max(F32 x) {
    for (int i = 1; i < 16; ++i) x.v[0] = x.v[i] > x.v[0] ? x.v[i] : x.v[0];
    return x.v[0];
}
inline F32 select_greater(F32 x, F32 y, F32 yes, F32 no) {
    return lanes<F32>([&](int i) { return x.v[i] > y.v[i] ? yes.v[i] : no.v[i]; });
}
// The first n (<= 16) floats; the other lanes are `fill`, and nothing beyond p[n - 1] is read.
inline F32 load_first(const float* p, int n, float fill) {
    return lanes<F32>([&](int i) { return i < n ? p[i] : fill; });
}

inline U32 set_u32(uint32_t x) {
    return lanes<U32>([&](int) { return x; });
}
inline U32 load_u32(const void* p) {
    U32 out;
    __builtin_memcpy(out.v, p, 64);
    return out;
}
inline U32 load_once(const void* p) { return load_u32(p); }
inline void store_u32(void* p, U32 x) { __builtin_memcpy(p, x.v, 64); }
inline U32 load_u8(const void* p) {
    return lanes<U32>([&](int i) { return uint32_t(((const uint8_t*)p)[i]); });
}
inline U32 load_u16(const void* p) {
    return lanes<U32>([&](int i) {
        uint16_t half;
        __builtin_memcpy(&half, (const char*)p + 2 * i, 2);
        return uint32_t(half);
    });
}
template <int n>
inline U32 shl(U32 x) {
    return lanes<U32>([&](int i) { return x.v[i] << n; });
}
template <int n>
inline U32 shr(U32 x) {
    return lanes<U32>([&](int i) { return x.v[i] >> n; });
}
template <int n>
inline U32 sar(U32 x) {
    return lanes<U32>([&](int i) { return uint32_t(int32_t(x.v[i]) >> n); });
}
inline U32 bit_and(U32 x, U32 y) {
    return lanes<U32>([&](int i) { return x.v[i] & y.v[i]; });
}
inline U32 bit_or(U32 x, U32 y) {
    return lanes<U32>([&](int i) { return x.v[i] | y.v[i]; });
}
inline U32 add(U32 x, U32 y) {
    return lanes<U32>([&](int i) { return x.v[i] + y.v[i]; });
}
inline U32 equal(U32 x, U32 y) {
    return lanes<U32>([&](int i) { return x.v[i] == y.v[i] ? ~0u : 0u; });
}
inline U32 select(U32 mask, U32 yes, U32 no) {
    return lanes<U32>([&](int i) { return (mask.v[i] & yes.v[i]) | (~mask.v[i] & no.v[i]); });
}
inline F32 as_f32(U32 x) {
    return lanes<F32>([&](int i) { return float_of(x.v[i]); });
}
inline U32 as_u32(F32 x) {
    return lanes<U32>([&](int i) { return bits_of(x.v[i]); });
}
inline F32 to_f32(U32 x) {  // signed
    return lanes<F32>([&](int i) { return float(int32_t(x.v[i])); });
}
inline U32 to_i32(F32 x) {
    const F32 whole = round_even(x);
    return lanes<U32>([&](int i) { return whole.v[i] == whole.v[i] ? uint32_t(int32_t(whole.v[i])) : 0x80000000u; });
}
inline float f16_value(uint32_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float subnormal = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -subnormal : subnormal;
}
inline uint32_t f16_bits(float x) {  // to nearest, ties to even
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00u;
    if (size >= 0x477ff000u) return sign | 0x7c00u;
    if (size < 0x38800000u) {  // adding 0.5 leaves the subnormal's bits at the bottom of the sum
        volatile float shifted = float_of(size) + 0.5f;
        return sign | (bits_of(shifted) - 0x3f000000u);
    }
    return sign | ((size + 0xfffu + (size >> 13 & 1) - 0x38000000u) >> 13);
}
inline F32 load_f16(const void* p) {
    const U32 halves = load_u16(p);
    return lanes<F32>([&](int i) { return f16_value(halves.v[i]); });
}
inline void store_u16(void* p, U32 x) {
    for (int i = 0; i < 16; ++i) {
        const uint16_t half = uint16_t(x.v[i]);
        __builtin_memcpy((char*)p + 2 * i, &half, 2);
    }
}
inline void store_f16(void* p, F32 x) {
    store_u16(p, lanes<U32>([&](int i) { return f16_bits(x.v[i]); }));
}
// 16 table entries looked up by the low 4 bits of each lane; higher bits are ignored.
struct Table16 {
    const float* entries;
};
inline Table16 load_table(const float* t) { return {t}; }
inline F32 lookup(Table16 t, U32 index) {
    return lanes<F32>([&](int i) { return t.entries[index.v[i] & 15]; });
}
// The value of a float16 whose bits are in the low half of each lane (the high half must be zero).
inline F32 f16_lanes(U32 x) {
    return lanes<F32>([&](int i) { return f16_value(x.v[i]); });
}
