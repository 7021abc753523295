#include "nibbles.h"

#include <algorithm>

#if defined(__x86_64__)
#include <tmmintrin.h>
#endif

namespace proa {
namespace {

void look_up_bytes(const uint16_t (&table)[16], const uint8_t* codes, int bytes, uint16_t* to) {
    for (int i = 0; i < bytes; ++i) to[2 * i] = table[codes[i] & 15], to[2 * i + 1] = table[codes[i] >> 4];
}

#if defined(__x86_64__)
// Needs SSSE3 for pshufb, which look_up_nibbles checks: baseline x86-64 has only SSE2.
__attribute__((target("ssse3"))) void look_up_by_shuffles(const uint16_t (*tables)[16], int group_bytes,
                                                          const uint8_t* codes, int bytes, uint16_t* to) {
    const __m128i byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    for (int first = 0; first < bytes; first += group_bytes, ++tables) {
        const auto half = [&](int h) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(*tables) + h); };
        const __m128i lows = _mm_packus_epi16(_mm_and_si128(half(0), byte), _mm_and_si128(half(1), byte));
        const __m128i highs = _mm_packus_epi16(_mm_srli_epi16(half(0), 8), _mm_srli_epi16(half(1), 8));
        const int end = std::min(bytes, first + group_bytes);
        int i = first;
        for (; i + 8 <= end; i += 8) {
            const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
            const __m128i even = _mm_and_si128(both, nibble), odd = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
            const __m128i in_order = _mm_unpacklo_epi8(even, odd);
            const __m128i low = _mm_shuffle_epi8(lows, in_order), high = _mm_shuffle_epi8(highs, in_order);
            auto* out = reinterpret_cast<__m128i*>(to + 2 * i);
            _mm_storeu_si128(out, _mm_unpacklo_epi8(low, high));
            _mm_storeu_si128(out + 1, _mm_unpackhi_epi8(low, high));
        }
        look_up_bytes(*tables, codes + i, end - i, to + 2 * i);
    }
}
#endif

}  // namespace

void look_up_nibbles_plainly(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes,
                             uint16_t* to) {
    for (int first = 0; first < bytes; first += group_bytes, ++tables)
        look_up_bytes(*tables, codes + first, std::min(group_bytes, bytes - first), to + 2 * first);
}

void look_up_nibbles(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes, uint16_t* to) {
#if defined(__x86_64__)
    static const bool shuffles = __builtin_cpu_supports("ssse3");
    if (shuffles) return look_up_by_shuffles(tables, group_bytes, codes, bytes, to);
#endif
    look_up_nibbles_plainly(tables, group_bytes, codes, bytes, to);
}

}  // namespace proa
