// Unpacks GGUF blocks (ggml's layouts) into packed formats, exactly. Types without a format of their own are widened:
// codes to more bits, table entries to integers, two-level scales to float32.
#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"
#include "finite.h"
#include "pack.h"
#include "words.h"

namespace proa {
namespace {

// Destination of one row's words of codes and its scales.
struct Row {
    uint32_t* words;
    uint8_t *scales, *mins, *block_scales, *block_mins;
};

// The rows of one panel, as words and scales.
class PanelRows {
  public:
    PanelRows(const Layout& l, int blocks)
        : words_(l.code_bytes / kLineBytes),
          scales_(size_t(l.groups) * 4),  // the largest
          block_scales_(size_t(blocks) * 2),
          codes_(kPanelRows * words_),
          memory_(kPanelRows * 2 * (scales_ + block_scales_)) {}

    Row row(int r) {
        const size_t i = size_t(r);
        return {codes_.data() + i * words_, part(0) + i * scales_, part(1) + i * scales_, part(2) + i * block_scales_,
                part(3) + i * block_scales_};
    }
    // Packs the panel; returns whether scales and minimums are finite.
    bool put(const Layout& l, int rows, uint8_t* panel) {
        put_lines(l, (const uint8_t*)codes_.data(), words_ * 4, rows, panel);
        put_scales(l, {nullptr, 0, part(0), scales_, 1, part(1), part(2), part(3), block_scales_, 1.f}, 0, rows, panel);
        return finite(l.format);
    }

  private:
    // Missing rows are zeros.
    bool finite(Format format) {
        switch (facts_of(format).scale_type) {
            case ScaleType::kBlock8:
            case ScaleType::kBlock16:
                return all_finite(Stored::kF16, part(2), kPanelRows * block_scales_);  // two parts
            case ScaleType::kE8m0: return all_finite(Stored::kE8m0, part(0), kPanelRows * scales_);
            case ScaleType::kF32: return all_finite(Stored::kF32, part(0), kPanelRows * scales_ / 2);
            default: return all_finite(Stored::kF16, part(0), kPanelRows * scales_);
        }
    }
    uint8_t* part(int i) {
        return memory_.data() + kPanelRows * (size_t(std::min(i, 2)) * scales_ + (i > 2 ? block_scales_ : 0));
    }

    size_t words_;                  // per row
    size_t scales_, block_scales_;  // bytes per row
    std::vector<uint32_t> codes_;
    std::vector<uint8_t> memory_;
};

// 32 codes of four bits, the first 16 in the low nibbles.
void words_of_halves(const uint8_t* packed, uint32_t* words) {
    for (int i = 0; i < 2; ++i) {
        const uint64_t both = read<uint64_t>(packed + i * 8);
        words[i] = word_of_nibbles(both & kNibbles), words[2 + i] = word_of_nibbles(both >> 4 & kNibbles);
    }
}

void take_q4(const uint8_t* block, int i, bool has_min, const Row& row) {
    std::memcpy(row.scales + i * 2, block, 2);
    if (has_min) std::memcpy(row.mins + i * 2, block + 2, 2);
    words_of_halves(block + (has_min ? 4 : 2), row.words + i * 4);
}

void take_q8(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.scales + i * 2, block, 2);
    for (int k = 0; k < 8; ++k) row.words[i * 8 + k] = word_of_bytes(read<uint32_t>(block + 2 + k * 4));
}

// d, dmin, 12 bytes of scales, 128 bytes of nibbles, of which each 32 have the codes of two groups.
void take_q4_k(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.block_scales + i * 2, block, 2);
    std::memcpy(row.block_mins + i * 2, block + 2, 2);
    six_bit_scales(block + 4, row.scales + i * 8, row.mins + i * 8);
    uint32_t* words = row.words + i * 32;
    for (int k = 0; k < 16; ++k) {
        const uint64_t both = read<uint64_t>(block + 16 + k * 8);
        uint32_t* at = words + k / 4 * 8 + k % 4;
        at[0] = word_of_nibbles(both & kNibbles), at[4] = word_of_nibbles(both >> 4 & kNibbles);
    }
}

// d, dmin, 12 bytes of scales, 32 of fifth bits (bit g for group g), 128 of nibbles as in Q4_K.
void take_q5_k(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.block_scales + i * 2, block, 2);
    std::memcpy(row.block_mins + i * 2, block + 2, 2);
    six_bit_scales(block + 4, row.scales + i * 8, row.mins + i * 8);
    for (int part = 0; part < 16; ++part) {
        uint64_t codes[2];
        for (int k = 0; k < 2; ++k) codes[k] = five_bit_codes(block, part / 2, part % 2 * 16 + k * 8);
        words_of_sixes(codes[0], codes[1], row.words + (i * 16 + part) * 3);
    }
}

// Codes, 16 signed scales, d.
void take_q6_k(const uint8_t* block, int i, const Row& row) {
    for (int part = 0; part < 16; ++part)
        words_of_sixes(six_bit_codes(block, part, 0), six_bit_codes(block, part, 8), row.words + (i * 16 + part) * 3);
    std::memcpy(row.scales + i * 16, block + 192, 16);
    std::memcpy(row.block_scales + i * 2, block + 208, 2);
}

void words_of_values(const int8_t* values, int count, uint32_t* words) {
    for (int k = 0; k < count; k += 4) words[k / 4] = word_of_bytes(read<uint32_t>(values + k));
}

// d, 32 fifth bits, nibbles.
void take_q5_0(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.scales + i * 2, block, 2);
    for (int k = 0; k < 32; k += 8) {
        const uint64_t low = read<uint64_t>(block + 6 + k % 16) >> k / 16 * 4 & kNibbles;
        const uint64_t below = (sixteens(block[2 + k / 8]) ^ 0x1010101010101010u) >> 4;  // 1 for codes below 16
        const uint64_t values = low | below * 0xf0;                                      // two's complement
        row.words[i * 8 + k / 4] = word_of_bytes(uint32_t(values));
        row.words[i * 8 + k / 4 + 1] = word_of_bytes(uint32_t(values >> 32));
    }
}

void take_iq4_nl(const uint8_t* block, int i, const Row& row) {
    std::memcpy(row.scales + i * 2, block, 2);
    int8_t values[32];
    iq4_values(block + 2, values);
    words_of_values(values, 32, row.words + i * 8);
}

void put_float(uint8_t* to, float value) { std::memcpy(to, &value, 4); }

void take_iq4_xs(const uint8_t* block, int i, const Row& row) {
    const float d = from_half(read<uint16_t>(block));
    for (int g = i * 8; g < i * 8 + 8; ++g) {
        put_float(row.scales + g * 4, float(iq4_xs_scale(block, g % 8)) * d);
        int8_t values[32];
        iq4_values(block + 8 + g % 8 * 16, values);
        words_of_values(values, 32, row.words + g * 8);
    }
}

void take_mxfp4(const uint8_t* block, int i, const Row& row) {
    row.scales[i] = block[0];
    words_of_halves(block + 1, row.words + i * 4);
}

void take_q2_k(const uint8_t* block, int i, const Row& row) {
    const float d = from_half(read<uint16_t>(block + 80)), dmin = from_half(read<uint16_t>(block + 82));
    for (int part = 0; part < 16; ++part) {
        const int g = i * 16 + part;
        put_float(row.scales + g * 4, float(block[part] & 15) * d);
        put_float(row.mins + g * 4, -(float(block[part] >> 4) * dmin));
        for (int k = 0; k < 2; ++k) row.words[g * 2 + k] = word_of_nibbles(two_bit_codes(block + 16, part, k * 8));
    }
}

// Q3_K's codes plus 4 are 4-bit codes with zero point 8.
void take_q3_k(const uint8_t* block, int i, const Row& row) {
    const float d = from_half(read<uint16_t>(block + 108));
    int8_t scales[16];
    three_bit_scales(block + 96, scales);
    for (int part = 0; part < 16; ++part) {
        const int g = i * 16 + part;
        put_float(row.scales + g * 4, float(scales[part]) * d);
        for (int k = 0; k < 2; ++k)
            row.words[g * 2 + k] = word_of_nibbles(three_bit_codes(block, part, k * 8) + 0x0404040404040404);
    }
}

void take(Stored type, const uint8_t* block, int i, const Row& row) {
    switch (type) {
        case Stored::kQ4_0: return take_q4(block, i, false, row);
        case Stored::kQ4_1: return take_q4(block, i, true, row);
        case Stored::kQ8_0: return take_q8(block, i, row);
        case Stored::kQ4K: return take_q4_k(block, i, row);
        case Stored::kQ5K: return take_q5_k(block, i, row);
        case Stored::kQ6K: return take_q6_k(block, i, row);
        case Stored::kQ5_0: return take_q5_0(block, i, row);
        case Stored::kQ2K: return take_q2_k(block, i, row);
        case Stored::kQ3K: return take_q3_k(block, i, row);
        case Stored::kIq4Nl: return take_iq4_nl(block, i, row);
        case Stored::kIq4Xs: return take_iq4_xs(block, i, row);
        case Stored::kMxfp4: return take_mxfp4(block, i, row);
        default: return;  // kept_format has refused it
    }
}

}  // namespace

bool pack_blocks(Stored type, const Layout& l, const uint8_t* blocks, size_t row_stride, int rows, int step,
                 uint8_t* out) {
    const StoredFacts facts = facts_of(type);
    const KeptFormat kept = kept_format(type);
    if (l.columns % facts.block_values || l.format != kept.format || l.group != kept.group)
        throw Error(PROA_ERROR_ARGUMENT, "Rows of " + std::to_string(l.columns) + " columns are not whole blocks of " +
                                             std::to_string(facts.block_values) +
                                             ", or the layout has another format or group than the type.");
    const int count = l.columns / facts.block_values;
    PanelRows parts(l, count);
    bool finite = true;
    for (int first = 0; first < rows; first += kPanelRows) {
        const int here = std::min(kPanelRows, rows - first);
        for (int r = 0; r < here; ++r)
            for (int i = 0; i < count; ++i)
                take(type, blocks + size_t(first + r) * row_stride + size_t(i) * size_t(facts.block_bytes), i,
                     parts.row(r));
        finite &= parts.put(l, here, out + size_t(first / kPanelRows) * size_t(step) * l.panel_bytes);
    }
    return finite;
}

}  // namespace proa
