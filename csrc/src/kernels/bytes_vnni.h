// Integer dot products by AVX-512 VNNI, and bytes of codes by VBMI.
#pragma once

// Lane by lane: sum + the four unsigned bytes of `codes` times the four signed ones of `x`.
inline U32 dot_bytes(U32 sum, U32 codes, U32 x) { return {_mm512_dpbusd_epi32(sum.v, codes.v, x.v)}; }
inline U32 bit_xor(U32 a, U32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// The high nibble of each byte. An affine map of its bits is one operation, a shift and a mask two.
inline U32 high_nibbles(U32 a) {
#ifdef __GFNI__
    constexpr int64_t kFourUp = 0x1020408000000000;  // bit i comes from bit i + 4; the first row is bit 7's
    return {_mm512_gf2p8affine_epi64_epi8(a.v, _mm512_set1_epi64(kFourUp), 0)};
#else
    return bit_and(shr<4>(a), set_u32(0x0f0f0f0f));
#endif
}

// A table of 16 bytes, repeated four times: vpermb reads six bits of an index, so that the two extra bits are harmless.
struct alignas(64) ByteTable {
    uint8_t bytes[64];
};
constexpr ByteTable byte_table(const uint8_t (&values)[16]) {
    ByteTable t{};
    for (int i = 0; i < 64; ++i) t.bytes[i] = values[i & 15];
    return t;
}
inline U32 look_up_bytes(const ByteTable& table, U32 index) {
    return {_mm512_permutexvar_epi8(index.v, _mm512_load_si512(table.bytes))};
}

// Shifts that move the upper bit pairs of quad q of six-bit codes to bits 4 and 5 of their bytes (see SixQuads); the
// other bits are arbitrary.
struct alignas(64) BitOffsets {
    uint8_t of[64];
};
constexpr BitOffsets upper_offsets(int q) {
    BitOffsets out{};
    for (int i = 0; i < 64; ++i) {  // vpmultishiftqb: eight bits of each byte's quadword, from this one on
        const int at = 2 * (q % 2) + 8 * (q / 2) + 4 * (i % 2) + 16 * (i / 2 % 2) + 32 * (i / 4 % 2);
        out.of[i] = uint8_t((at + 60) % 64);
    }
    return out;
}
constexpr BitOffsets kUpper[4] = {upper_offsets(0), upper_offsets(1), upper_offsets(2), upper_offsets(3)};
template <int q>
inline U32 upper_pairs(U32 line) {
    return {_mm512_multishift_epi64_epi8(_mm512_load_si512(kUpper[q].of), line.v)};
}

// Extracts bytes 2, 1 and 0 of each lane, 16 of each, with lanes in the order `order`.
struct alignas(64) DigitBytes {
    uint8_t from[64];
};
constexpr DigitBytes digit_bytes(const int (&order)[16]) {
    DigitBytes out{};
    for (int i = 0; i < 48; ++i) out.from[i] = uint8_t(4 * order[i % 16] + 2 - i / 16);
    return out;
}
inline void store_digits(uint8_t* to, U32 lanes, const DigitBytes& order) {
    const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(order.from), lanes.v);
    _mm512_mask_storeu_epi8(to, 0xffffffffffff, bytes);
}
