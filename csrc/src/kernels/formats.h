// Formats as pairs of code and scales.
#pragma once

// Calls f.operator()<Code, Scales>() for the format.
template <class F>
inline __attribute__((always_inline)) void with_format(Format format, F&& f) {
    switch (format) {
        case Format::kBf16: return f.template operator()<Bf16Code, NoScale>();
        case Format::kFp16: return f.template operator()<Fp16Code, NoScale>();
        case Format::kFp8Row: return f.template operator()<E4m3Code, F32Rows>();
        case Format::kFp8Panel: return f.template operator()<E4m3Code, F32Panel>();
        case Format::kMxfp8: return f.template operator()<E4m3Code, E8m0Rows>();
        case Format::kInt8F32: return f.template operator()<Int8Code, F32Rows>();
        case Format::kInt8F16: return f.template operator()<Int8Code, F16Rows>();
        case Format::kInt4F32: return f.template operator()<NibbleCode<IntegerNibble<8>>, F32Rows>();
        case Format::kInt4F16: return f.template operator()<NibbleCode<IntegerNibble<8>>, F16Rows>();
        case Format::kInt4Bf16: return f.template operator()<NibbleCode<IntegerNibble<8>>, Bf16Rows>();
        case Format::kUint4F32: return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<F32Rows>>();
        case Format::kUint4F16: return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<F16Rows>>();
        case Format::kUint4Bf16: return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<Bf16Rows>>();
        case Format::kNvfp4: return f.template operator()<NibbleCode<E2m1Nibble>, NvRows>();
        case Format::kMxfp4: return f.template operator()<NibbleCode<E2m1Nibble>, E8m0Rows>();
        case Format::kQ4K: return f.template operator()<NibbleCode<IntegerNibble<0>>, Q4kRows>();
        case Format::kQ6K: return f.template operator()<SixCode<32>, Q6kRows>();
        case Format::kQ5K: return f.template operator()<SixCode<0>, Q4kRows>();
    }
}
