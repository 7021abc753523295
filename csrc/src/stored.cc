// In ggml's blocks, d, m and dmin are float16. Where a block of 32 has nibbles, elements 0 to 15 are in the low ones of
// 16 bytes, and elements 16 to 31 in the high ones.
#include "stored.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "bfloat16.h"
#include "error.h"
#include "words.h"

namespace proa {

// Vectorisable: no branches, signed conversions.
float from_half(uint16_t half) {
    const int32_t size = half & 0x7fff;
    // Subnormal halves as multiples of 2^-24: assembling bits would give subnormal floats, which workers flush.
    const uint32_t small = std::bit_cast<uint32_t>(float(size) * 0x1p-24f);
    const uint32_t large = (uint32_t(size) << 13) + (112u << 23) + (uint32_t(0x7bff - size) >> 31) * (112u << 23);
    const uint32_t is_small = uint32_t((size - 0x400) >> 31);
    return std::bit_cast<float>(uint32_t(half & 0x8000) << 16 | (small & is_small) | (large & ~is_small));
}

namespace {

float half_at(const uint8_t* p) { return from_half(read<uint16_t>(p)); }

// Unpacks the codes of blocks to one per byte, eight at a time.
template <int N>
struct Codes {
    uint8_t at[N];

    void put(int i, uint64_t eight) { std::memcpy(at + i, &eight, 8); }
    // 16 low nibbles, then 16 high ones.
    void put_nibbles(int i, const uint8_t* from) {
        for (int k = 0; k < 16; k += 8) {
            const uint64_t both = read<uint64_t>(from + k);
            put(i + k, both & kNibbles), put(i + 16 + k, both >> 4 & kNibbles);
        }
    }
    // Adds the fifth bits: bit i of `bits` adds 16 to code i.
    void add_fifths(const uint8_t* bits) {
        for (int k = 0; k < N; k += 8) put(k, read<uint64_t>(at + k) | sixteens(bits[k / 8]));
    }
};

template <int N>
void scale(const uint8_t* codes, int zero, float d, float* to) {
    for (int i = 0; i < N; ++i) to[i] = float(int(codes[i]) - zero) * d;
}
template <int N>
void scale_and_add(const uint8_t* codes, float d, float m, float* to) {
    for (int i = 0; i < N; ++i) to[i] = float(int(codes[i])) * d + m;
}

void q8_0(const uint8_t* b, float* to) {
    const float d = half_at(b);
    for (int i = 0; i < 32; ++i) to[i] = float(int8_t(b[2 + i])) * d;
}

void q4_0(const uint8_t* b, float* to) {
    Codes<32> codes;
    codes.put_nibbles(0, b + 2);
    scale<32>(codes.at, 8, half_at(b), to);
}

void q4_1(const uint8_t* b, float* to) {
    Codes<32> codes;
    codes.put_nibbles(0, b + 4);
    scale_and_add<32>(codes.at, half_at(b), half_at(b + 2), to);
}

void q5_0(const uint8_t* b, float* to) {
    Codes<32> codes;
    codes.put_nibbles(0, b + 6);
    codes.add_fifths(b + 2);
    scale<32>(codes.at, 16, half_at(b), to);
}

void q5_1(const uint8_t* b, float* to) {
    Codes<32> codes;
    codes.put_nibbles(0, b + 8);
    codes.add_fifths(b + 4);
    scale_and_add<32>(codes.at, half_at(b), half_at(b + 2), to);
}

// d, dmin, 12 bytes of 6-bit scales and minimums of 8 groups of 32.
void scale_groups(const uint8_t* b, const uint8_t* codes, float* to) {
    const float d = half_at(b), dmin = half_at(b + 2);
    uint8_t scales[8], mins[8];
    six_bit_scales(b + 4, scales, mins);
    for (int g = 0; g < 8; ++g)
        scale_and_add<32>(codes + g * 32, float(scales[g]) * d, -(float(mins[g]) * dmin), to + g * 32);
}

// Codes i of groups 2 g and 2 g + 1 are the nibbles of byte 32 g + i.
void q4_k(const uint8_t* b, float* to) {
    Codes<256> codes;
    for (int i = 0; i < 128; i += 8) {
        const uint64_t both = read<uint64_t>(b + 16 + i);
        codes.put(i / 32 * 64 + i % 32, both & kNibbles), codes.put(i / 32 * 64 + 32 + i % 32, both >> 4 & kNibbles);
    }
    scale_groups(b, codes.at, to);
}

// Q4_K with 32 more bytes of fifth bits.
void q5_k(const uint8_t* b, float* to) {
    Codes<256> codes;
    for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 32; i += 8) codes.put(g * 32 + i, five_bit_codes(b, g, i));
    scale_groups(b, codes.at, to);
}

// 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales of groups of 16, d.
void q6_k(const uint8_t* b, float* to) {
    const float d = half_at(b + 208);
    for (int part = 0; part < 16; ++part) {
        Codes<16> codes;
        codes.put(0, six_bit_codes(b, part, 0)), codes.put(8, six_bit_codes(b, part, 8));
        scale<16>(codes.at, 32, float(int8_t(b[192 + part])) * d, to + part * 16);
    }
}

// 16 bytes of scales and minimums of 4 bits, 64 of pairs of bits, d, dmin.
void q2_k(const uint8_t* b, float* to) {
    const float d = half_at(b + 80), dmin = half_at(b + 82);
    for (int part = 0; part < 16; ++part) {
        Codes<16> codes;
        codes.put(0, two_bit_codes(b + 16, part, 0)), codes.put(8, two_bit_codes(b + 16, part, 8));
        scale_and_add<16>(codes.at, float(b[part] & 15) * d, -(float(b[part] >> 4) * dmin), to + part * 16);
    }
}

// 32 bytes of upper bits, 64 of pairs of bits, 12 of scales, d.
void q3_k(const uint8_t* b, float* to) {
    const float d = half_at(b + 108);
    int8_t scales[16];
    three_bit_scales(b + 96, scales);
    for (int part = 0; part < 16; ++part) {
        Codes<16> codes;
        codes.put(0, three_bit_codes(b, part, 0)), codes.put(8, three_bit_codes(b, part, 8));
        scale<16>(codes.at, 4, float(scales[part]) * d, to + part * 16);
    }
}

void iq4(const uint8_t* packed, float d, float* to) {
    int8_t values[32];
    iq4_values(packed, values);
    for (int i = 0; i < 32; ++i) to[i] = float(values[i]) * d;
}

void iq4_nl(const uint8_t* b, float* to) { iq4(b + 2, half_at(b), to); }

void iq4_xs(const uint8_t* b, float* to) {
    for (int g = 0; g < 8; ++g) iq4(b + 8 + g * 16, float(iq4_xs_scale(b, g)) * half_at(b), to + g * 32);
}

// e4m3 and e2m1 are read as a float16 with their exponent and fraction in its fields, which is 2^8 or 2^14 times too
// small.
float e4m3(uint8_t code) {
    const int32_t size = code & 0x7f;
    const uint32_t number = std::bit_cast<uint32_t>(from_half(uint16_t(size << 7)) * 0x1p8f);
    const uint32_t is_nan = uint32_t(0x7e - size) >> 31;
    return std::bit_cast<float>(number | is_nan * 0x7fc00000 | uint32_t(code & 0x80) << 24);
}

float e8m0(uint8_t code) { return std::bit_cast<float>(code == 255 ? 0x7fc00000 : uint32_t(code) << 23); }

float e2m1(uint8_t code) { return from_half(uint16_t((code & 7) << 9 | (code & 8) << 12)) * 0x1p14f; }

// An exponent, then 16 bytes of codes.
void mxfp4(const uint8_t* b, float* to) {
    Codes<32> codes;
    codes.put_nibbles(0, b + 1);
    for (int i = 0; i < 32; ++i) to[i] = e2m1(codes.at[i]) * e8m0(b[0]);
}

// Two values per byte, the one in the low bits first.
template <class Value>
void nibbles(const uint8_t* from, size_t values, float* to, Value&& value) {
    for (size_t i = 0; i < values / 2; ++i) {
        to[2 * i] = value(uint8_t(from[i] & 15));
        to[2 * i + 1] = value(uint8_t(from[i] >> 4));
    }
}

void each_block(void (*decode)(const uint8_t*, float*), StoredFacts of, const uint8_t* from, size_t values, float* to) {
    for (size_t i = 0; i < values; i += size_t(of.block_values), from += of.block_bytes) decode(from, to + i);
}

}  // namespace

namespace {

constexpr int32_t kNoFormat = PROA_NO_FORMAT;

// In the order in which messages list them.
constexpr proa_stored_info kTypes[] = {
    // name, type, values and bytes of a block, the packed format that holds the blocks without rounding, its group
    {"F32", int32_t(Stored::kF32), 1, 4, kNoFormat, 0},
    {"F16", int32_t(Stored::kF16), 1, 2, kNoFormat, 0},
    {"BF16", int32_t(Stored::kBf16), 1, 2, kNoFormat, 0},
    {"F64", int32_t(Stored::kF64), 1, 8, kNoFormat, 0},
    {"Q4_0", int32_t(Stored::kQ4_0), 32, 18, int32_t(Format::kInt4F16), 32},
    {"Q4_1", int32_t(Stored::kQ4_1), 32, 20, int32_t(Format::kUint4F16), 32},
    {"Q5_0", int32_t(Stored::kQ5_0), 32, 22, int32_t(Format::kInt8F16), 32},
    {"Q5_1", int32_t(Stored::kQ5_1), 32, 24, kNoFormat, 0},
    {"Q8_0", int32_t(Stored::kQ8_0), 32, 34, int32_t(Format::kInt8F16), 32},
    {"Q2_K", int32_t(Stored::kQ2K), 256, 84, int32_t(Format::kUint4F32), 16},
    {"Q3_K", int32_t(Stored::kQ3K), 256, 110, int32_t(Format::kInt4F32), 16},
    {"Q4_K", int32_t(Stored::kQ4K), 256, 144, int32_t(Format::kQ4K), 32},
    {"Q5_K", int32_t(Stored::kQ5K), 256, 176, int32_t(Format::kQ5K), 32},
    {"Q6_K", int32_t(Stored::kQ6K), 256, 210, int32_t(Format::kQ6K), 16},
    {"IQ4_NL", int32_t(Stored::kIq4Nl), 32, 18, int32_t(Format::kInt8F16), 32},
    {"IQ4_XS", int32_t(Stored::kIq4Xs), 256, 136, int32_t(Format::kInt8F32), 32},
    {"MXFP4", int32_t(Stored::kMxfp4), 32, 17, int32_t(Format::kMxfp4), 32},
    // Codes, whose scales are separate tensors: coded.h.
    {"E4M3", int32_t(Stored::kE4m3), 1, 1, kNoFormat, 0},
    {"E8M0", int32_t(Stored::kE8m0), 1, 1, kNoFormat, 0},
    {"INT8", int32_t(Stored::kInt8), 1, 1, kNoFormat, 0},
    {"UINT8", int32_t(Stored::kUint8), 1, 1, kNoFormat, 0},
    {"INT4", int32_t(Stored::kInt4), 2, 1, kNoFormat, 0},
    {"UINT4", int32_t(Stored::kUint4), 2, 1, kNoFormat, 0},
    {"E2M1", int32_t(Stored::kE2m1), 2, 1, kNoFormat, 0},
    {"SIGNED4", int32_t(Stored::kSigned4), 2, 1, kNoFormat, 0},
};

const proa_stored_info& info_of(Stored type) {
    for (const proa_stored_info& row : kTypes)
        if (row.type == int32_t(type)) return row;
    throw Error(PROA_ERROR_ARGUMENT, "No stored type has the number " + std::to_string(int(type)) + ".");
}

}  // namespace

std::span<const proa_stored_info> stored_types() { return kTypes; }

StoredFacts facts_of(Stored type) {
    const proa_stored_info& row = info_of(type);
    return {row.block_values, row.block_bytes};
}

KeptFormat kept_format(Stored type) {
    const proa_stored_info& row = info_of(type);
    if (row.format == kNoFormat)
        throw Error(PROA_ERROR_ARGUMENT, std::string("No packed format holds the stored type ") + row.name + ".");
    return {Format(row.format), row.group};
}

void to_float(Stored type, const uint8_t* from, size_t values, float* to) {
    const auto plain = [&]<class T>(auto&& number, T) {
        for (size_t i = 0; i < values; ++i) to[i] = number(read<T>(from + i * sizeof(T)));
    };
    const auto blocks = [&](void (*decode)(const uint8_t*, float*)) {
        each_block(decode, facts_of(type), from, values, to);
    };
    switch (type) {
        case Stored::kF32: std::memcpy(to, from, values * 4); return;
        case Stored::kF16: return plain(from_half, uint16_t());
        case Stored::kBf16:
            return plain([](uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }, uint16_t());
        case Stored::kF64: return plain([](double x) { return float(x); }, double());
        case Stored::kQ4_0: return blocks(q4_0);
        case Stored::kQ4_1: return blocks(q4_1);
        case Stored::kQ5_0: return blocks(q5_0);
        case Stored::kQ5_1: return blocks(q5_1);
        case Stored::kQ8_0: return blocks(q8_0);
        case Stored::kQ4K: return blocks(q4_k);
        case Stored::kQ5K: return blocks(q5_k);
        case Stored::kQ6K: return blocks(q6_k);
        case Stored::kQ2K: return blocks(q2_k);
        case Stored::kQ3K: return blocks(q3_k);
        case Stored::kIq4Nl: return blocks(iq4_nl);
        case Stored::kIq4Xs: return blocks(iq4_xs);
        case Stored::kMxfp4: return blocks(mxfp4);
        case Stored::kE4m3: return plain(e4m3, uint8_t());
        case Stored::kE8m0: return plain(e8m0, uint8_t());
        case Stored::kInt8: return plain([](int8_t x) { return float(x); }, int8_t());
        case Stored::kUint8: return plain([](uint8_t x) { return float(int(x) - 128); }, uint8_t());
        case Stored::kInt4: return nibbles(from, values, to, [](uint8_t x) { return float(int(x) - 8); });
        case Stored::kUint4: return nibbles(from, values, to, [](uint8_t x) { return float(x); });
        case Stored::kE2m1: return nibbles(from, values, to, e2m1);
        case Stored::kSigned4: return nibbles(from, values, to, [](uint8_t x) { return float(int(x ^ 8) - 8); });
    }
}

void to_bf16(Stored type, const uint8_t* from, size_t values, uint16_t* to) {
    if (type == Stored::kBf16) {
        std::memcpy(to, from, values * 2);
        return;
    }
    constexpr size_t kPart = 256;  // whole blocks of every type
    const StoredFacts facts = facts_of(type);
    float part[kPart];
    for (size_t i = 0; i < values; i += kPart, from += kPart / size_t(facts.block_values) * size_t(facts.block_bytes)) {
        const size_t count = std::min(kPart, values - i);
        to_float(type, from, count, part);
        round_to_bf16(part, count, to + i);
    }
}

}  // namespace proa
