// 16 lanes of 32 bits as two vectors of AVX2, FMA and F16C. Same functions as vec_avx512.h.
#pragma once

struct F32 {
    __m256 a, b;
};
struct U32 {
    __m256i a, b;
};

constexpr int kVectorRegisters = 8;  // in units of 16 lanes

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 round_even(F32 x) { return {_mm256_round_ps(x.a, 0), _mm256_round_ps(x.b, 0)}; }
inline float reduce_add(F32 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
// out[i] = the sum of the lanes of argument i.
inline void reduce_add4(F32 w, F32 x, F32 y, F32 z, float* out) {
    const __m256 wx = _mm256_hadd_ps(_mm256_add_ps(w.a, w.b), _mm256_add_ps(x.a, x.b));
    const __m256 yz = _mm256_hadd_ps(_mm256_add_ps(y.a, y.b), _mm256_add_ps(z.a, z.b));
    const __m256 quads = _mm256_hadd_ps(wx, yz);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}
inline float reduce_max(F32 x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline F32 select_greater(F32 x, F32 y, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}
// The first n (<= 16) floats; the other lanes are `fill`, and nothing beyond p[n - 1] is read.
inline F32 load_first(const float* p, int n, float fill) {
    alignas(32) float all[16];
    for (int i = 0; i < 16; ++i) all[i] = i < n ? p[i] : fill;
    return {_mm256_load_ps(all), _mm256_load_ps(all + 8)};
}

inline U32 set_u32(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline U32 load_u32(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline U32 load_once(const void* p) { return load_u32(p); }
inline void store_u32(void* p, U32 x) {
    _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
inline U32 load_u8(const void* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline U32 load_u16(const void* p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1))};
}
template <int n>
inline U32 shl(U32 x) {
    return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <int n>
inline U32 shr(U32 x) {
    return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
template <int n>
inline U32 sar(U32 x) {
    return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
inline U32 bit_and(U32 x, U32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline U32 bit_or(U32 x, U32 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline U32 add(U32 x, U32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline U32 equal(U32 x, U32 y) { return {_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)}; }
inline U32 select(U32 mask, U32 yes, U32 no) {
    return {_mm256_blendv_epi8(no.a, yes.a, mask.a), _mm256_blendv_epi8(no.b, yes.b, mask.b)};
}
inline F32 as_f32(U32 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline U32 as_u32(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F32 to_f32(U32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }  // signed
inline U32 to_i32(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 load_f16(const void* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline void store_f16(void* p, F32 x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0)), _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
// Two vectors of 32-bit lanes below 65536 -> 16 halves in order.
inline __m256i narrow(U32 x) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8); }
inline void store_u16(void* p, U32 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
// 16 table entries looked up by the low 4 bits of each lane; higher bits are ignored.
struct Table16 {
    __m256 low, high;
};
inline Table16 load_table(const float* t) { return {_mm256_loadu_ps(t), _mm256_loadu_ps(t + 8)}; }
inline __m256 lookup8(Table16 t, __m256i index) {  // vpermps reads three bits; the fourth is moved to the sign
    const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index), _mm256_permutevar8x32_ps(t.high, index), fourth);
}
inline F32 lookup(Table16 t, U32 index) { return {lookup8(t, index.a), lookup8(t, index.b)}; }
// The value of a float16 whose bits are in the low half of each lane (the high half must be zero).
inline F32 f16_lanes(U32 x) {
    const __m256i halves = narrow(x);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
