// Decoders of the formats: the structs of codes.h and scales.h for the types of a row of formats.h.
#pragma once

// Returns an object of the struct that decodes a type of code.
template <CodeType type>
constexpr auto decoder_of() {
    if constexpr (type == CodeType::kBf16) return Bf16Code{};
    if constexpr (type == CodeType::kFp16) return Fp16Code{};
    if constexpr (type == CodeType::kE4m3) return E4m3Code{};
    if constexpr (type == CodeType::kInt8) return Int8Code{};
    if constexpr (type == CodeType::kInt4) return NibbleCode<IntegerNibble<8>>{};
    if constexpr (type == CodeType::kUint4) return NibbleCode<IntegerNibble<0>>{};
    if constexpr (type == CodeType::kE2m1) return NibbleCode<E2m1Nibble>{};
    if constexpr (type == CodeType::kInt6) return SixCode<32>{};
    if constexpr (type == CodeType::kUint6) return SixCode<0>{};
}

// decoder_of for a type of scale.
template <ScaleType type>
constexpr auto scales_of() {
    if constexpr (type == ScaleType::kNone) return NoScale{};
    if constexpr (type == ScaleType::kF32) return F32Rows{};
    if constexpr (type == ScaleType::kF16) return F16Rows{};
    if constexpr (type == ScaleType::kBf16) return Bf16Rows{};
    if constexpr (type == ScaleType::kF32Panel) return F32Panel{};
    if constexpr (type == ScaleType::kE8m0) return E8m0Rows{};
    if constexpr (type == ScaleType::kE4m3) return NvRows{};
    if constexpr (type == ScaleType::kBlock8) return Q4kRows{};
    if constexpr (type == ScaleType::kBlock16) return Q6kRows{};
}

template <class Scales, bool has_min>
struct Minimums {
    using Type = WithMin<Scales>;
};
template <class Scales>
    requires Scales::kHasMin
struct Minimums<Scales, true> {
    using Type = Scales;
};
template <class Scales>
struct Minimums<Scales, false> {
    using Type = Scales;
};

template <Format format>
using DecoderOf = decltype(decoder_of<code_of(format)>());
template <Format format>
using ScalesOf = typename Minimums<decltype(scales_of<facts_of(format).scale_type>()), facts_of(format).has_min>::Type;

// Calls f.operator()<Code, Scales, format>() with the format's types.
template <class F>
inline __attribute__((always_inline)) void with_format(Format format, F&& f) {
#define PROA_CASE(identifier, ...) \
    case Format::identifier:       \
        return f.template operator()<DecoderOf<Format::identifier>, ScalesOf<Format::identifier>, Format::identifier>();
    switch (format) { PROA_FORMATS(PROA_CASE) }
#undef PROA_CASE
}
