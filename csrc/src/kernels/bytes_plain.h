// The functions of bytes_vnni.h in plain C++, so that the code built on them can be tested on any CPU.
#pragma once

inline U32 dot_bytes(U32 sum, U32 codes, U32 x) {
    return lanes<U32>([&](int i) {
        int32_t total = int32_t(sum.v[i]);
        for (int k = 0; k < 32; k += 8) total += int32_t(codes.v[i] >> k & 255) * int8_t(x.v[i] >> k & 255);
        return uint32_t(total);
    });
}
inline U32 bit_xor(U32 a, U32 b) {
    return lanes<U32>([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline U32 high_nibbles(U32 a) { return bit_and(shr<4>(a), set_u32(0x0f0f0f0f)); }

struct ByteTable {
    uint8_t bytes[16];
};
constexpr ByteTable byte_table(const uint8_t (&values)[16]) {
    ByteTable t{};
    for (int i = 0; i < 16; ++i) t.bytes[i] = values[i];
    return t;
}
inline U32 look_up_bytes(const ByteTable& table, U32 index) {
    return lanes<U32>([&](int i) {
        uint32_t found = 0;
        for (int k = 0; k < 32; k += 8) found |= uint32_t(table.bytes[index.v[i] >> k & 15]) << k;
        return found;
    });
}

template <int q>
inline U32 upper_pairs(U32 line) {
    return lanes<U32>([&](int i) {
        uint32_t found = 0;
        for (int k = 0; k < 4; ++k)
            found |= (line.v[i] >> (2 * (q % 2) + 8 * (q / 2) + 4 * (k % 2) + 16 * (k / 2)) & 3) << (8 * k + 4);
        return found;
    });
}

struct DigitBytes {
    uint8_t from[48];  // bytes of 16 lanes
};
constexpr DigitBytes digit_bytes(const int (&order)[16]) {
    DigitBytes out{};
    for (int i = 0; i < 48; ++i) out.from[i] = uint8_t(4 * order[i % 16] + 2 - i / 16);
    return out;
}
inline void store_digits(uint8_t* to, U32 lanes, const DigitBytes& order) {
    for (int i = 0; i < 48; ++i) to[i] = uint8_t(lanes.v[order.from[i] / 4] >> (order.from[i] % 4 * 8));
}
