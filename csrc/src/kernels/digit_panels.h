// Products of panels whose codes are small integers with activations as digits (see digits.h), by integer dot products:
// a term of panels.h. One struct per code: `load` returns the codes of 16 columns as unsigned bytes, four columns per
// quad. Never: many tokens, which are multiplied as bfloat16.
#pragma once

struct DigitCode {
    static constexpr int kValues = kDigitColumns;
};

template <int zero_point>
struct NibbleQuads : DigitCode {
    static constexpr int kBytes = 128, kZero = zero_point;
    static constexpr Packing::Form kForm = Packing::kNibbleDigits;
    static constexpr float kStep = 1;
    static inline __attribute__((always_inline)) void load(const uint8_t* p, U32 (&quads)[4]) {
        const U32 low = set_u32(0x0f0f0f0f), first = load_u32(p), second = load_u32(p + 64);
        quads[0] = bit_and(first, low), quads[1] = high_nibbles(first);
        quads[2] = bit_and(second, low), quads[3] = high_nibbles(second);
    }
};

// e2m1 values times 2, plus 12.
struct E2m1Quads : DigitCode {
    static constexpr int kBytes = 128, kZero = 12;
    static constexpr Packing::Form kForm = Packing::kNibbleDigits;
    static constexpr float kStep = .5f;
    static constexpr ByteTable kCodes = byte_table({12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0});
    static inline __attribute__((always_inline)) void load(const uint8_t* p, U32 (&quads)[4]) {
        const U32 first = load_u32(p), second = load_u32(p + 64);
        quads[0] = look_up_bytes(kCodes, first), quads[1] = look_up_bytes(kCodes, shr<4>(first));
        quads[2] = look_up_bytes(kCodes, second), quads[3] = look_up_bytes(kCodes, shr<4>(second));
    }
};

struct Int8Quads : DigitCode {
    static constexpr int kBytes = 256, kZero = 128;
    static constexpr Packing::Form kForm = Packing::kByteDigits;
    static constexpr float kStep = 1;
    static inline __attribute__((always_inline)) void load(const uint8_t* p, U32 (&quads)[4]) {
        for (int q = 0; q < 4; ++q) quads[q] = bit_xor(load_u32(p + 64 * q), set_u32(0x80808080));
    }
};

template <int zero_point>
struct SixQuads : DigitCode {
    static constexpr int kBytes = 192, kZero = zero_point;
    static constexpr Packing::Form kForm = Packing::kNibbleDigits;
    static constexpr float kStep = 1;
    static inline __attribute__((always_inline)) void load(const uint8_t* p, U32 (&quads)[4]) {
        NibbleQuads<0>::load(p, quads);
        const U32 high = load_u32(p + 128), mask = set_u32(0x30303030);
        quads[0] = bit_or(quads[0], bit_and(upper_pairs<0>(high), mask));
        quads[1] = bit_or(quads[1], bit_and(upper_pairs<1>(high), mask));
        quads[2] = bit_or(quads[2], bit_and(upper_pairs<2>(high), mask));
        quads[3] = bit_or(quads[3], bit_and(upper_pairs<3>(high), mask));
    }
};

// Returns an object of the struct that gives a type of code as bytes; only for integers.
template <CodeType type>
constexpr auto quads_of() {
    if constexpr (type == CodeType::kInt8) return Int8Quads{};
    if constexpr (type == CodeType::kInt4) return NibbleQuads<8>{};
    if constexpr (type == CodeType::kUint4) return NibbleQuads<0>{};
    if constexpr (type == CodeType::kE2m1) return E2m1Quads{};
    if constexpr (type == CodeType::kInt6) return SixQuads<32>{};
    if constexpr (type == CodeType::kUint6) return SixQuads<0>{};
}

// Calls f.operator()<Code, Scales, format>() for the format, if its codes are integers.
template <class F>
inline __attribute__((always_inline)) void with_integers(Format format, F&& f) {
#define PROA_CASE(identifier, ...)                                                            \
    case Format::identifier:                                                                  \
        if constexpr (facts_of(Format::identifier).code().integers)                           \
            return f.template operator()<decltype(quads_of<code_of(Format::identifier)>()),   \
                                         ScalesOf<Format::identifier>, Format::identifier>(); \
        else                                                                                  \
            return;
    switch (format) { PROA_FORMATS(PROA_CASE) }
#undef PROA_CASE
}

// Tokens up to which a format's codes are multiplied as integers.
constexpr int digit_tokens(Format f) { return facts_of(f).code().integers ? digits_to_tokens(f) : 0; }

inline bool by_digits(const Layout& l, int tokens) {
    const int most = digit_tokens(l.format);
    return most > 0 && tokens <= most;
}

inline Packing digit_packing(const Layout& l) {
    Packing how{};
    with_integers(l.format, [&]<class Code, class Scales, Format format>() {
        how = {digits_to_tokens(format), Code::kForm, Code::kZero, Code::kStep};
    });
    return how;
}

// 16 columns of R panels times a token, by three digits each. Codes are below 256 and digits at most 128 in magnitude:
// 16 products, times 256, plus 16 more, fit into 32 bits.
template <int R>
inline __attribute__((always_inline)) void add_columns(const U32 (&quads)[R][4], const DigitLine& line, F32 (&sum)[R]) {
    U32 high[R], low[R];
    for (int r = 0; r < R; ++r) high[r] = set_u32(uint32_t(line.high)), low[r] = set_u32(uint32_t(line.low));
    const auto add_digit = [&](int digit, U32(&to)[R]) __attribute__((always_inline)) {
        for (int q = 0; q < 4; ++q) {
            uint32_t four;
            __builtin_memcpy(&four, line.digits[digit] + 4 * q, 4);
            const U32 x = set_u32(four);
            for (int r = 0; r < R; ++r) to[r] = dot_bytes(to[r], quads[r][q], x);
        }
    };
    add_digit(0, high);
    for (int r = 0; r < R; ++r) high[r] = shl<8>(high[r]);
    add_digit(1, high);
    add_digit(2, low);
    const F32 scale = set(line.scale);
    for (int r = 0; r < R; ++r) sum[r] = fma(fma(to_f32(high[r]), set(256.f), to_f32(low[r])), scale, sum[r]);
}

template <class Code, int R, int M>
    requires kInteger<Code>
struct Lines<Code, R, M> {
    static inline __attribute__((always_inline)) void add(F32 (&sum)[R][M], const uint8_t* const (&w)[R], int first,
                                                          int last, const Fetch<Code, R>& fetch, const void* x) {
        for (int unit = first; unit < last; ++unit) {
            U32 quads[R][4];
            for (int r = 0; r < R; ++r) Code::load(w[r] + size_t(unit) * Code::kBytes, quads[r]);
            fetch.line(w, unit);
            const DigitLine* at = (const DigitLine*)x + size_t(unit) * M;
            unrolled<M>([&](auto m) __attribute__((always_inline)) {
                F32 sums[R];
                for (int r = 0; r < R; ++r) sums[r] = sum[r][m.value];
                add_columns(quads, at[m.value], sums);
                for (int r = 0; r < R; ++r) sum[r][m.value] = sums[r];
            });
        }
    }
};

void multiply_digits(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, const uint8_t* next) {
    with_integers(l.format, [&]<class Code, class Scales, Format format>() {
        constexpr int tokens = digits_to_tokens(format);
        if constexpr (tokens > 0) run_panels<Code, Scales, 1, tokens>(l, w, panels, x, out, next);
    });
}
