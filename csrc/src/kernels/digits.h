// Activations in fixed point, for products with codes that are small integers. 16 columns of a token share a scale, a
// power of two; each value is three signed base-256 digits: x = scale * (65536 a + 256 b + c). The 16 values take a
// line of 64 bytes: 16 digits a, then b, then c, in the order of the codes' bytes; then the scale and the initial
// values of the sums of products. Never: weights.
//
// Accuracy: the largest of the 16 values is 2^22 to 2^23 units. bfloat16 has eight significant bits, so values down to
// 2^-14 of the largest are exact, and the error of the others is at most half a unit, 2^-23 of the largest.
#pragma once

constexpr int kDigitColumns = 16;

struct DigitLine {
    uint8_t digits[3][kDigitColumns];
    float scale;
    int32_t high, low;  // minus `zero` times the sum of the digits a, and of 256 b + c
    uint32_t unused;
};
static_assert(sizeof(DigitLine) == kLineBytes);

// Order of four columns in a lane's bytes: see layout.h.
constexpr int kByteOrder[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
// Order of the low nibbles, then the high ones, of a line of eight columns.
constexpr int kNibbleOrder[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
constexpr DigitBytes kDigitsOfBytes = digit_bytes(kByteOrder), kDigitsOfNibbles = digit_bytes(kNibbleOrder);

// Writes the line of 16 columns of a token, bfloat16 in the lanes' low halves. A non-finite value makes the scale NaN.
inline void put_digits(const Packing& how, uint8_t* line, U32 bits) {
    const U32 sizes = bit_and(bits, set_u32(0x7fff));
    const int largest = int(reduce_max(to_f32(sizes)));
    // Exponent of the power of two above the largest value, even after rounding up; units stay normal numbers.
    int exponent = (largest + 1) >> 7;
    if (exponent < 24) exponent = 24;
    const bool finite = largest < 0x7f80;
    DigitLine ends{};
    ends.scale = finite ? __builtin_bit_cast(float, uint32_t(exponent - 22) << 23) * how.step : __builtin_nanf("");
    U32 fixed = set_u32(0);
    if (finite) {
        const F32 units = mul(as_f32(shl<16>(bits)), set(__builtin_bit_cast(float, uint32_t(276 - exponent) << 23)));
        const F32 coarse = round_even(mul(units, set(1.f / 256)));
        fixed = add(shl<8>(to_i32(coarse)), to_i32(fma(coarse, set(-256.f), units)));
        const U32 carried = add(fixed, set_u32(0x8080)), first = sar<16>(carried);
        const F32 high = to_f32(first);
        ends.high = -how.zero * int(reduce_add(high));
        ends.low = -how.zero * int(reduce_add(fma(high, set(-65536.f), to_f32(fixed))));
        fixed = bit_xor(carried, set_u32(0x8080));
    }
    store_digits(line, fixed, how.form == Packing::kByteDigits ? kDigitsOfBytes : kDigitsOfNibbles);
    __builtin_memcpy(line + offsetof(DigitLine, scale), &ends.scale, kLineBytes - offsetof(DigitLine, scale));
}
