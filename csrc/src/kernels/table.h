// Formats as pairs of code and scales; the products and the table of this instruction set's kernels.
#pragma once

// Calls f.run<Code, Scales>() for the format.
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
        case Format::kQ6K: return f.template operator()<Q6Code, Q6kRows>();
    }
}

inline bool expands(Format format, int tokens) { return format != Format::kBf16 && tokens >= kExpandFromTokens; }

inline int block_tokens(Format format, int tokens) {
    return format == Format::kBf16 || format == Format::kFp16 || expands(format, tokens) ? kMostPlain : kMostScaled;
}

size_t expand_bytes(const Layout& l, int panels, int tokens) {
    return expands(l.format, tokens) ? size_t(panels) * l.padded * 32 : 0;
}

void expand(const Layout& l, const uint8_t* w, void* out) {
    with_format(l.format, [&]<class Code, class Scales>() { expand_panel<Code, Scales>(l, w, (uint8_t*)out); });
}

void matmul(const Layout& l, const uint8_t* w, int panels, const Packed& x, float* out, void* scratch) {
    const XPair* pairs = (const XPair*)x.pairs;
    with_format(l.format, [&]<class Code, class Scales>() {
        if (!expands(l.format, x.tokens)) {
            constexpr int most = Scales::kScaled ? kMostScaled : kMostPlain;
            return run_panels<Code, Scales, most>(l, w, panels, pairs, x.sums, x.tokens, out);
        }
        Layout wide = l;
        wide.panel_bytes = size_t(l.padded) * 32;
        for (int i = 0; i < panels; ++i)
            expand_panel<Code, Scales>(l, w + i * l.panel_bytes, (uint8_t*)scratch + i * wide.panel_bytes);
        run_panels<Bf16Code, NoScale, kMostPlain>(wide, (const uint8_t*)scratch, panels, pairs, nullptr, x.tokens, out);
    });
}

void pack(const uint16_t* x, size_t stride, const int32_t* index, int first, int last, int columns, int padded,
          const Packed& out) {
    each_block(out, padded, [&](int begin, int size, XPair* block, float* block_sums) {
        const int end = begin + size;
        for (int t = begin > first ? begin : first; t < (end < last ? end : last); ++t) {
            const uint16_t* row = x + (index ? size_t(index[t]) : size_t(t)) * stride;
            XPair* pairs = block + (t - begin);
            for (int k = 0; k < columns / 2; ++k) pairs[size_t(k) * size] = make_xpair(row[2 * k], row[2 * k + 1]);
            if (columns % 2) pairs[size_t(columns / 2) * size] = make_xpair(row[columns - 1], 0);
            for (int k = (columns + 1) / 2; k < padded / 2; ++k) pairs[size_t(k) * size] = make_xpair(0, 0);
            if (!block_sums) continue;
            float* sums = block_sums + (t - begin);
            for (int i = 0; i < padded / 16; ++i) {
                float sum = 0;
                for (int k = i * 16; k < (i + 1) * 16 && k < columns; ++k) sum += bf16_value(row[k]);
                sums[size_t(i) * size] = sum;
            }
        }
    });
}

constexpr Kernels kernels(const char* name) {
    return {name,        sizeof(XPair), block_tokens, pack,          matmul,       expand_bytes, expand,
            activate,    clear_columns, accumulate,   store_rows,    rms_norm_row, add_row,      gated_add_row,
            rotate_head, route_row,     kQueryLine,   pack_query,    attend,       merge_states, finish_state,
            pack_keys,   pack_values,   softmax_tile, scale_and_add, peak,         read};
}
