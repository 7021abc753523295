// Scales of a group for the 16 rows of a panel. One struct per kind: scale(base, g) and, if the kind has them,
// minimum(base, g) and factor(base) of the whole panel. base: the panel's scale area.
#pragma once

// kFewBits: code times scale is exact in bfloat16.
struct NoScale {
    static constexpr bool kScaled = false, kHasMin = false, kHasFactor = false, kFewBits = false;
};

struct PlainScale {
    static constexpr bool kScaled = true, kHasMin = false, kHasFactor = false, kFewBits = false;
};

struct F32Rows : PlainScale {
    static F32 scale(const uint8_t* base, int g) { return load((const float*)(base + 64 * g)); }
};
struct F16Rows : PlainScale {
    static F32 scale(const uint8_t* base, int g) { return load_f16(base + 32 * g); }
};
struct Bf16Rows : PlainScale {
    static F32 scale(const uint8_t* base, int g) { return load_bf16(base + 32 * g); }
};
struct F32Panel : PlainScale {
    static F32 scale(const uint8_t* base, int g) { return set(((const float*)base)[g]); }
};
// A power of two, as its biased exponent. 2^-127 would be subnormal and counts as 0. 255 is NaN.
struct E8m0Rows : PlainScale {
    static constexpr bool kFewBits = true;
    static F32 scale(const uint8_t* base, int g) {
        const U32 code = load_u8(base + 16 * g);
        return as_f32(select(equal(code, set_u32(255)), set_u32(0x7fc00000), shl<23>(code)));
    }
};
struct NvRows {
    static constexpr bool kScaled = true, kHasMin = false, kHasFactor = true, kFewBits = true;
    // Scales are not negative and not NaN (checked when packing).
    static F32 scale(const uint8_t* base, int g) {
        return mul(f16_lanes(shl<7>(load_u8(base + 64 + 16 * g))), set(256.f));
    }
    static F32 factor(const uint8_t* base) { return set(*(const float*)base); }
};

template <class Rows>
struct WithMin {
    static constexpr bool kScaled = true, kHasMin = true, kHasFactor = false, kFewBits = false;
    static F32 scale(const uint8_t* base, int g) { return Rows::scale(base, 2 * g); }
    static F32 minimum(const uint8_t* base, int g) { return Rows::scale(base, 2 * g + 1); }
};

// GGUF's Q4_K and Q5_K: blocks of 8 groups: d and dmin in float16, then 8-bit factors of each group's scale and
// minimum.
struct Q4kRows {
    static constexpr bool kScaled = true, kHasMin = true, kHasFactor = false, kFewBits = false;
    static constexpr int kBlock = 64 + 8 * 32;
    static const uint8_t* block(const uint8_t* base, int g) { return base + (g >> 3) * kBlock; }
    static F32 bytes(const uint8_t* p) { return to_f32(load_u8(p)); }
    static F32 scale(const uint8_t* base, int g) {
        return mul(load_f16(block(base, g)), bytes(block(base, g) + 64 + 32 * (g & 7)));
    }
    static F32 minimum(const uint8_t* base, int g) {
        return sub(zero(), mul(load_f16(block(base, g) + 32), bytes(block(base, g) + 80 + 32 * (g & 7))));
    }
};

// GGUF's Q6_K: blocks of 16 groups: d in float16, then a signed 8-bit factor of each group.
struct Q6kRows : PlainScale {
    static constexpr int kBlock = 32 + 16 * 16;
    static F32 scale(const uint8_t* base, int g) {
        const uint8_t* block = base + (g >> 4) * kBlock;
        const F32 factor = to_f32(sar<24>(shl<24>(load_u8(block + 32 + 16 * (g & 15)))));
        return mul(load_f16(block), factor);
    }
};

// Kinds with only scales: if a row has a single scale, its sums can be multiplied by it instead of its weights.
template <class Scales>
constexpr bool kScalesAlone = Scales::kScaled && !Scales::kHasFactor && !Scales::kHasMin;
