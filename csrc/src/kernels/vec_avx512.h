// 16 lanes of 32 bits on AVX-512 F/BW/VL/DQ: the lanes are rows of a panel, or 16 neighbours of a row of activations.
// Included inside the anonymous namespace of one file per instruction set: no symbol may reach the linker.
#pragma once

struct F32 {
    __m512 v;
};
struct U32 {
    __m512i v;
};

constexpr int kVectorRegisters = 32;  // in units of 16 lanes

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 set(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F32 round_even(F32 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
inline float reduce_add(F32 a) { return _mm512_reduce_add_ps(a.v); }
// out[i] = the sum of the lanes of argument i.
inline void reduce_add4(F32 a, F32 b, F32 c, F32 d, float* out) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512 quads = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
}
inline float reduce_max(F32 a) { return _mm512_reduce_max_ps(a.v); }
inline F32 select_greater(F32 a, F32 b, F32 yes, F32 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), no.v, yes.v)};
}
// The first n (<= 16) floats; the other lanes are `fill`, and nothing beyond p[n - 1] is read.
inline F32 load_first(const float* p, int n, float fill) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), __mmask16((1u << n) - 1), p)};
}

inline U32 set_u32(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
inline U32 load_u32(const void* p) { return {_mm512_loadu_si512(p)}; }
// Loads a vector for several shifts once: GCC would reload it for each of them.
inline U32 load_once(const void* p) {
    U32 line = load_u32(p);
    asm("" : "+v"(line.v));
    return line;
}
inline void store_u32(void* p, U32 a) { _mm512_storeu_si512(p, a.v); }
inline U32 load_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline U32 load_u16(const void* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
template <int n>
inline U32 shl(U32 a) {
    return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
inline U32 shr(U32 a) {
    return {_mm512_srli_epi32(a.v, n)};
}
template <int n>
inline U32 sar(U32 a) {
    return {_mm512_srai_epi32(a.v, n)};
}
inline U32 bit_and(U32 a, U32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline U32 bit_or(U32 a, U32 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline U32 add(U32 a, U32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline U32 equal(U32 a, U32 b) { return {_mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a.v, b.v))}; }
inline U32 select(U32 mask, U32 yes, U32 no) { return {_mm512_ternarylogic_epi32(mask.v, yes.v, no.v, 0xca)}; }
inline F32 as_f32(U32 a) { return {_mm512_castsi512_ps(a.v)}; }
inline U32 as_u32(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 to_f32(U32 a) { return {_mm512_cvtepi32_ps(a.v)}; }  // signed
inline U32 to_i32(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32 load_f16(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_f16(void* p, F32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, 0)); }
inline void store_u16(void* p, U32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
// 16 table entries looked up by the low 4 bits of each lane; higher bits are ignored.
struct Table16 {
    __m512 v;
};
inline Table16 load_table(const float* t) { return {_mm512_loadu_ps(t)}; }
inline F32 lookup(Table16 t, U32 index) { return {_mm512_permutexvar_ps(index.v, t.v)}; }
// The value of a float16 whose bits are in the low half of each lane (the high half must be zero).
inline F32 f16_lanes(U32 a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
