// The formats as pairs of code and scales.
#pragma once

// Calls f.operator()<Code, Scales, format>() with the format's types.
template <class F>
inline __attribute__((always_inline)) void with_format(Format format, F&& f) {
    switch (format) {
        case Format::kBf16: return f.template operator()<Bf16Code, NoScale, Format::kBf16>();
        case Format::kFp16: return f.template operator()<Fp16Code, NoScale, Format::kFp16>();
        case Format::kFp8Row: return f.template operator()<E4m3Code, F32Rows, Format::kFp8Row>();
        case Format::kFp8Panel: return f.template operator()<E4m3Code, F32Panel, Format::kFp8Panel>();
        case Format::kMxfp8: return f.template operator()<E4m3Code, E8m0Rows, Format::kMxfp8>();
        case Format::kInt8F32: return f.template operator()<Int8Code, F32Rows, Format::kInt8F32>();
        case Format::kInt8F16: return f.template operator()<Int8Code, F16Rows, Format::kInt8F16>();
        case Format::kInt4F32: return f.template operator()<NibbleCode<IntegerNibble<8>>, F32Rows, Format::kInt4F32>();
        case Format::kInt4F16: return f.template operator()<NibbleCode<IntegerNibble<8>>, F16Rows, Format::kInt4F16>();
        case Format::kInt4Bf16:
            return f.template operator()<NibbleCode<IntegerNibble<8>>, Bf16Rows, Format::kInt4Bf16>();
        case Format::kUint4F32:
            return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<F32Rows>, Format::kUint4F32>();
        case Format::kUint4F16:
            return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<F16Rows>, Format::kUint4F16>();
        case Format::kUint4Bf16:
            return f.template operator()<NibbleCode<IntegerNibble<0>>, WithMin<Bf16Rows>, Format::kUint4Bf16>();
        case Format::kNvfp4: return f.template operator()<NibbleCode<E2m1Nibble>, NvRows, Format::kNvfp4>();
        case Format::kMxfp4: return f.template operator()<NibbleCode<E2m1Nibble>, E8m0Rows, Format::kMxfp4>();
        case Format::kQ4K: return f.template operator()<NibbleCode<IntegerNibble<0>>, Q4kRows, Format::kQ4K>();
        case Format::kQ6K: return f.template operator()<SixCode<32>, Q6kRows, Format::kQ6K>();
        case Format::kQ5K: return f.template operator()<SixCode<0>, Q4kRows, Format::kQ5K>();
    }
}
