// The e4m3 KV cache (see codes.h): converts rows of bfloat16 to e4m3 and back. Never: pages, scales of layers.
#pragma once

// Rounds to e4m3 in the lanes' lowest bytes: to nearest, ties to even; finite values saturate at +-448, non-finite ones
// become NaN.
inline U32 e4m3_codes(F32 x) {
    const U32 bits = as_u32(x), size = bit_and(bits, set_u32(0x7fffffff));
    const F32 held = min(as_f32(size), set(448.f));
    const U32 word = as_u32(held), odd = bit_and(shr<20>(word), set_u32(1));
    const U32 normal = add(shr<20>(add(add(word, set_u32(0x7ffff)), odd)), set_u32(uint32_t(-(120 << 3))));
    // Adding 2^14, whose unit in the last place is 2^-9, leaves a subnormal's bits at the bottom of the sum.
    const U32 tiny = add(as_u32(add(held, set(16384.f))), set_u32(uint32_t(-0x46800000)));
    const U32 finite = as_u32(select_greater(set(0.015625f), held, as_f32(tiny), as_f32(normal)));
    const U32 is_not = sar<31>(add(size, set_u32(0x00800000)));
    return bit_or(select(is_not, set_u32(0x7f), finite), bit_and(shr<24>(bits), set_u32(0x80)));
}

// out[i] = e4m3(x[i] * inverse).
void to_e4m3(const uint16_t* x, int count, float inverse, uint8_t* out) {
    for (int i = 0; i < count; i += 16) {
        uint32_t codes[16];
        store_u32(codes, e4m3_codes(mul(load_bf16_first(x + i, count - i), set(inverse))));
        const int lanes = count - i < 16 ? count - i : 16;
        for (int j = 0; j < lanes; ++j) out[i + j] = uint8_t(codes[j]);
    }
}

// Converts 32 e4m3 values to bfloat16, in order.
inline U32 e4m3_values(const uint8_t* p) {
#ifdef PROA_BYTE_TABLES
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512i twice = _mm512_or_si512(codes, _mm512_slli_epi16(codes, 8));
    const ByteTables& t = kE4m3Tables;
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), twice, _mm512_load_si512(t.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), twice, _mm512_load_si512(t.high + 64));
    const __m512i size = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high);
    return {_mm512_ternarylogic_epi32(size, twice, _mm512_set1_epi16(int16_t(0x8000)), 0xf8)};
#else
    const U32 pairs = load_u16(p);
    const U32 even = as_u32(e4m3_lanes(bit_and(pairs, set_u32(0xff)))), odd = as_u32(e4m3_lanes(shr<8>(pairs)));
    return bit_or(shr<16>(even), bit_and(odd, set_u32(0xffff0000)));
#endif
}

void from_e4m3(const uint8_t* codes, int count, uint16_t* out) {
    int i = 0;
    for (; i + 32 <= count; i += 32) store_u32(out + i, e4m3_values(codes + i));
    if (i == count) return;
    uint8_t last[32] = {};
    uint16_t values[32];
    for (int j = 0; j < count - i; ++j) last[j] = codes[i + j];
    store_u32(values, e4m3_values(last));
    for (int j = 0; j < count - i; ++j) out[i + j] = values[j];
}
