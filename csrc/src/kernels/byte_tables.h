// Tables of the two bytes of the bfloat16 value of an 8-bit code, indexed by its seven low bits, for vpermi2b.
#pragma once

struct alignas(64) ByteTables {
    uint8_t low[128], high[128];
};

// Values of the codes that are not negative; 127 is NaN.
struct alignas(64) E4m3Values {
    float of[128];
};

constexpr E4m3Values make_e4m3_values() {
    E4m3Values v{};
    for (int code = 0; code < 127; ++code) {
        const int exponent = code >> 3, fraction = code & 7;
        float value = exponent ? float(8 + fraction) : float(fraction);
        for (int i = exponent ? exponent : 1; i < 10; ++i) value /= 2;
        for (int i = 10; i < exponent; ++i) value *= 2;
        v.of[code] = value;
    }
    v.of[127] = __builtin_nanf("");
    return v;
}
constexpr E4m3Values kE4m3Values = make_e4m3_values();

constexpr ByteTables make_e4m3_tables() {
    ByteTables t{};
    for (int code = 0; code < 128; ++code) {
        const uint32_t word = __builtin_bit_cast(uint32_t, kE4m3Values.of[code]) >> 16;
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
