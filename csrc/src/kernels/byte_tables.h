// Tables of the two bytes of the bfloat16 value of an 8-bit code, indexed by its seven low bits, for vpermi2b.
#pragma once

struct alignas(64) ByteTables {
    uint8_t low[128], high[128];
};

constexpr ByteTables make_e4m3_tables() {
    ByteTables t{};
    for (int code = 0; code < 128; ++code) {
        const int exponent = code >> 3, fraction = code & 7;
        float value = exponent ? float(8 + fraction) : float(fraction);
        for (int i = exponent ? exponent : 1; i < 10; ++i) value /= 2;
        for (int i = 10; i < exponent; ++i) value *= 2;
        const uint32_t word = code == 127 ? 0x7fc0 : __builtin_bit_cast(uint32_t, value) >> 16;
        t.low[code] = uint8_t(word & 255), t.high[code] = uint8_t(word >> 8);
    }
    return t;
}
constexpr ByteTables kE4m3Tables = make_e4m3_tables();

constexpr ByteTables make_int8_tables() {
    ByteTables t{};
    for (int i = 0; i < 128; ++i) {
        const uint32_t word = __builtin_bit_cast(uint32_t, float(i ? i : 128)) >> 16;
        t.low[i] = uint8_t(word & 255), t.high[i] = uint8_t(word >> 8);
    }
    return t;
}
constexpr ByteTables kInt8Tables = make_int8_tables();
