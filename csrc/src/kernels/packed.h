// Packed activations, as the products read them: in blocks of tokens; for every pair of columns one pair per token; for
// tiles (see tiles.h), for every 32 columns one line per token. Never: products.
#pragma once

constexpr int kMostPairTokens = 16;  // most tokens of a block of pairs
static_assert(kMostPlain <= kMostPairTokens && kMostScaled <= kMostPairTokens);

struct PackedBlock {
    int first, size;  // tokens
    void* data;
    float* sums;  // sums of 16 columns each, [padded / 16][size], or null
    Packing how;

    XPair* pairs() const { return (XPair*)data; }
    // The line of a token. Tiles: 32 columns in bfloat16, a row of a tile. Digits: 16 columns.
    uint8_t* line(int i, int t) const { return (uint8_t*)data + (size_t(i) * size + t) * kLineBytes; }
    bool in_pairs() const { return how.form == Packing::kPairs; }
    bool tiles() const { return how.form == Packing::kTiles; }
    bool digits() const { return how.form > Packing::kTiles; }

    // The sum of a token's columns in group g.
    float sum(int g, int group, int t) const {
        float sum = 0;
        for (int i = g * group / 16; i < (g + 1) * group / 16; ++i) sum += sums[size_t(i) * size + t];
        return sum;
    }

    // Stores 16 columns of a token, from column 16 i on; not for pairs.
    void put16(int i, int t, U32 bits) const {
        if (tiles()) return store_u16(line(i / 2, t) + i % 2 * 32, bits);
        put_digits(how, line(i, t), bits);
    }

    // Pairs only: stores columns `to` to `to` + `columns`, at most 32, of `count` tokens from `first` on; 32 elements
    // of each must be readable.
    void put_pairs(int to, int columns, int first, int count, const uint16_t* const* rows, int from) const {
        interleave_pairs(rows, from, count, columns / 2, pairs() + size_t(to / 2) * size + first, size_t(size));
    }
};

inline int blocks_of(const Packed& packed) { return block_count(packed.tokens, packed.how.block_tokens); }

inline PackedBlock block_of(const Packed& packed, int padded, int i) {
    const bool digits = packed.how.form > Packing::kTiles;
    const size_t row_bytes = digits ? size_t(padded / kDigitColumns) * kLineBytes : size_t(padded / 2) * sizeof(XPair);
    const int blocks = blocks_of(packed), first = block_begin(packed.tokens, blocks, i);
    return {first, block_begin(packed.tokens, blocks, i + 1) - first,
            (uint8_t*)packed.pairs + size_t(first) * row_bytes,
            packed.sums ? packed.sums + size_t(first) * (padded / 16) : nullptr, packed.how};
}

template <class F>
inline void each_block(const Packed& packed, int padded, F&& f) {
    for (int i = 0; i < blocks_of(packed); ++i) f(block_of(packed, padded, i));
}

// Packs tokens [first, last) of a block into pairs of columns; zero from `columns` on.
inline void pack_pairs(const PackedBlock& block, const uint16_t* const* rows, int first, int last, int columns,
                       int padded) {
    const int whole = columns / 32, count = last - first;
    for (int i = 0; i < whole; ++i) block.put_pairs(32 * i, 32, first, count, rows + first, 32 * i);
    for (int i = whole; 32 * i < padded; ++i) {
        uint16_t rest[kMostPairTokens][32] = {};
        const uint16_t* ends[kMostPairTokens];
        for (int t = 0; t < count; ++t) {
            ends[t] = rest[t];
            for (int k = 32 * i; k < columns; ++k) rest[t][k - 32 * i] = rows[first + t][k];
        }
        block.put_pairs(32 * i, padded - 32 * i < 32 ? padded - 32 * i : 32, first, count, ends, 0);
    }
}

// Packs tokens [first, last) of a block, kLinesAtOnce lines of each in turn, so that tile rows are written in order.
constexpr int kLinesAtOnce = 8;
inline void pack_lines(const PackedBlock& block, const uint16_t* const* rows, int first, int last, int columns,
                       int padded) {
    const int whole = columns / 32, lines = padded / 32;
    for (int begin = 0; begin < whole; begin += kLinesAtOnce) {
        const int end = begin + kLinesAtOnce < whole ? begin + kLinesAtOnce : whole;
        for (int t = first; t < last; ++t)
            for (int k = begin; k < end; ++k) __builtin_memcpy(block.line(k, t), rows[t] + 32 * k, kLineBytes);
    }
    for (int k = whole; k < lines; ++k)
        for (int t = first; t < last; ++t) {
            uint16_t rest[32] = {};
            for (int i = 0; i < columns - 32 * k && i < 32; ++i) rest[i] = rows[t][32 * k + i];
            __builtin_memcpy(block.line(k, t), rest, kLineBytes);
        }
}

// Packs a token's row into digits.
inline void pack_digits(const PackedBlock& block, int t, const uint16_t* row, int columns, int padded) {
    for (int i = 0; i < padded / kDigitColumns; ++i)
        put_digits(block.how, block.line(i, t), shr<16>(as_u32(load_bf16_first(row + i * 16, columns - i * 16))));
}

inline void sum_columns(const PackedBlock& block, int t, const uint16_t* row, int columns, int padded) {
    for (int i = 0; i < padded / 16; ++i)
        block.sums[size_t(i) * block.size + t] = reduce_add(load_bf16_first(row + i * 16, columns - i * 16));
}

// See Kernels::pack.
void pack(const uint16_t* x, size_t stride, const int32_t* index, int first, int last, int columns, int padded,
          const Packed& out) {
    each_block(out, padded, [&](const PackedBlock& block) {
        const int begin = first > block.first ? first - block.first : 0;
        const int end = last < block.first + block.size ? last - block.first : block.size;
        const uint16_t* rows[kTileTokens];
        for (int t = begin; t < end; ++t) {
            const int token = block.first + t;
            rows[t] = x + (index ? size_t(index[token]) : size_t(token)) * stride;
            if (block.digits()) pack_digits(block, t, rows[t], columns, padded);
            if (block.sums) sum_columns(block, t, rows[t], columns, padded);
        }
        if (begin >= end || block.digits()) return;
        if (block.tiles())
            pack_lines(block, rows, begin, end, columns, padded);
        else
            pack_pairs(block, rows, begin, end, columns, padded);
    });
}
