// Packs codes of one row into 32-bit words, the row's lanes of a panel's lines. Belongs here: shuffling bits in
// registers.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace proa {

constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0f;

template <class T>
T read(const void* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

typedef uint32_t FourWords __attribute__((vector_size(16)));

// Transposes four rows of four words, `stride` and `to_stride` bytes apart. The bitwise or of all words is added to
// `seen`.
inline void transpose_four(const uint8_t* words, size_t stride, uint8_t* to, size_t to_stride, FourWords& seen) {
    FourWords rows[4];
    for (int r = 0; r < 4; ++r) std::memcpy(&rows[r], words + size_t(r) * stride, sizeof rows[r]);
    seen |= (rows[0] | rows[1]) | (rows[2] | rows[3]);
#if defined(__SSE2__)
    const auto row = [&](int r) { return reinterpret_cast<__m128i>(rows[r]); };
    const auto put = [&](int r, __m128i x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + size_t(r) * to_stride), x);
    };
    const __m128i a = _mm_unpacklo_epi32(row(0), row(1)), b = _mm_unpacklo_epi32(row(2), row(3));
    const __m128i c = _mm_unpackhi_epi32(row(0), row(1)), d = _mm_unpackhi_epi32(row(2), row(3));
    put(0, _mm_unpacklo_epi64(a, b)), put(1, _mm_unpackhi_epi64(a, b));
    put(2, _mm_unpacklo_epi64(c, d)), put(3, _mm_unpackhi_epi64(c, d));
#else
    for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = rows[r][i];
            std::memcpy(to + size_t(i) * to_stride + r * 4, &word, 4);
        }
#endif
}

// Eight codes below 16, one per byte -> value i at bit 16 (i % 2) + 4 (i / 2).
inline uint32_t word_of_nibbles(uint64_t codes) {
    const uint64_t y = codes | codes >> 12;  // bytes 0 and 4: codes at even positions; 1 and 5: at odd ones
    return uint32_t((y & 0xff) | (y >> 24 & 0xff00) | (y << 8 & 0xff0000) | (y >> 16 & 0xff000000));
}

// Four codes of 8 bits -> value i at bit 16 (i % 2) + 8 (i / 2).
inline uint32_t word_of_bytes(uint32_t codes) {
    return (codes & 0xff0000ff) | (codes >> 8 & 0xff00) | (codes & 0xff00) << 8;
}

// Sixteen codes below 64, one per byte -> words of two lines with the low nibbles, and of one line with the upper pairs
// of bits, value i at bit 16 (i % 2) + 2 (i / 2).
inline void words_of_sixes(uint64_t low, uint64_t high, uint32_t* words) {
    const auto pairs = [](uint64_t x) {  // even positions in byte 0, odd ones in byte 2
        x = x >> 4 & 0x0303030303030303;
        x |= x >> 14;
        x |= x >> 28;
        return uint32_t((x & 0xff) | (x & 0xff00) << 8);
    };
    words[0] = word_of_nibbles(low & kNibbles);
    words[1] = word_of_nibbles(high & kNibbles);
    words[2] = pairs(low) | pairs(high) << 8;
}

// Codes at to at + 8 of group `part` (of 16) of a block of Q6_K: 128 bytes of low nibbles, 64 of upper pairs of bits.
inline uint64_t six_bit_codes(const uint8_t* block, int part, int at) {
    const uint8_t* low = block + part / 8 * 64 + part % 4 * 16 + at;
    const uint8_t* high = block + 128 + part / 8 * 32 + part % 2 * 16 + at;
    const uint64_t upper = read<uint64_t>(high) >> part % 8 / 2 * 2 << 4;
    return (read<uint64_t>(low) >> part % 8 / 4 * 4 & kNibbles) | (upper & 0x3030303030303030);
}

// The pairs of bits at to at + 8 of group `part` (of 16) of Q2_K and Q3_K: 64 bytes, each with those of four groups.
inline uint64_t two_bit_codes(const uint8_t* pairs, int part, int at) {
    return read<uint64_t>(pairs + part / 8 * 32 + part % 2 * 16 + at) >> part % 8 / 2 * 2 & 0x0303030303030303;
}

// Codes at to at + 8 of group `part` of a block of Q3_K, 0 to 7 for -4 to 3: 32 bytes of upper bits, 64 of pairs.
inline uint64_t three_bit_codes(const uint8_t* block, int part, int at) {
    const uint64_t upper = read<uint64_t>(block + part % 2 * 16 + at) >> part / 2 & 0x0101010101010101;
    return two_bit_codes(block + 32, part, at) | upper << 2;
}

// Q3_K's 12 bytes -> scales of 16 groups: their low nibbles, then their upper pairs of bits.
inline void three_bit_scales(const uint8_t* six, int8_t* scales) {
    for (int g = 0; g < 16; ++g)
        scales[g] = int8_t(((six[g % 8] >> g / 8 * 4 & 15) | (six[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
}

// The values of the codes of IQ4_NL and IQ4_XS.
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The values of both nibbles of a byte.
constexpr auto kIq4Pairs = [] {
    std::array<uint16_t, 256> pairs{};
    for (size_t i = 0; i < 256; ++i) pairs[i] = uint16_t(uint8_t(kIq4[i & 15]) | uint8_t(kIq4[i >> 4]) << 8);
    return pairs;
}();

// 16 bytes -> 32 values, the first 16 from the low nibbles.
inline void iq4_values(const uint8_t* packed, int8_t* values) {
    for (int i = 0; i < 16; ++i) {
        const uint16_t both = kIq4Pairs[packed[i]];
        values[i] = int8_t(both), values[16 + i] = int8_t(both >> 8);
    }
}

// Bit i -> 16 in byte i.
inline uint64_t sixteens(uint8_t bits) {
    const uint64_t own = (bits * 0x0101010101010101u) & 0x8040201008040201u;  // bit i stays in byte i
    return (own + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
}

// IQ4_XS: d, upper pairs of bits, low nibbles -> the scale of group `g` (of 8), less d.
inline int iq4_xs_scale(const uint8_t* block, int g) {
    return ((block[4 + g / 2] >> g % 2 * 4 & 15) | (read<uint16_t>(block + 2) >> 2 * g & 3) << 4) - 32;
}

// Codes at to at + 8 of group `g` (of 8) of a block of Q5_K: bit g of 32 bytes, and nibbles of those of two groups.
inline uint64_t five_bit_codes(const uint8_t* block, int g, int at) {
    const uint64_t low = read<uint64_t>(block + 48 + g / 2 * 32 + at) >> g % 2 * 4 & kNibbles;
    return low | (read<uint64_t>(block + 16 + at) >> g << 4 & 0x1010101010101010u);
}

// Q4_K's and Q5_K's 12 bytes -> scales and minimums of 6 bits of 8 groups.
inline void six_bit_scales(const uint8_t* six, uint8_t* scales, uint8_t* mins) {
    for (int g = 0; g < 4; ++g) {
        scales[g] = six[g] & 63, mins[g] = six[g + 4] & 63;
        scales[g + 4] = uint8_t((six[g + 8] & 15) | (six[g] >> 6) << 4);
        mins[g + 4] = uint8_t((six[g + 8] >> 4) | (six[g + 4] >> 6) << 4);
    }
}

}  // namespace proa
