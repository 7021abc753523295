// The ceilings of this instruction set, for benchmarks: products on registers only, and reading with its widest loads.
// Never: computing results.
#pragma once

constexpr int kPeakSums = kMostPlain >= 12 ? 24 : kMostPlain == 5 ? 5 : 3;  // sums that fit into the registers
constexpr int kPeakUnroll = 4;

// A product of bfloat16 pairs if the instruction set has one; else sum * value + value, so that no two products are
// equal.
inline F32 peak_step(F32 sum, F32 value, Broadcast x) {
    if constexpr (kBf16Dot) return dot(sum, from_values(value, value), x);
    return fma(sum, value, value);
}

// Computes `rounds` rounds of products on independent sums, and stores them in sums [16]. Returns the number of
// floating-point operations, two per product. seed: a small number that is not known at compile time.
double peak(int64_t rounds, float seed, float* sums) {
    if constexpr (kTiles) return tile_peak(rounds, seed, sums);
    const F32 value = set(seed);
    const XPair pair = make_xpair(to_bf16(seed), to_bf16(seed));
    const Broadcast x = broadcast(&pair);
    F32 sum[kPeakSums];
    unrolled<kPeakSums>([&](auto i) { sum[i.value] = set(seed * i.value); });
    for (int64_t round = 0; round < rounds; ++round)
        unrolled<kPeakUnroll * kPeakSums>([&](auto i) {
            F32& s = sum[i.value % kPeakSums];
            s = peak_step(s, value, x);
        });
    unrolled<kPeakSums - 1>([&](auto i) { sum[kPeakSums - 1] = add(sum[kPeakSums - 1], sum[i.value]); });
    store(sums, sum[kPeakSums - 1]);
    return double(rounds) * kPeakUnroll * kPeakSums * 16 * (kBf16Dot ? 4 : 2);
}

// Reads `bytes` bytes, a multiple of 256, and or-s them into bits [16]. Prefetches like the products: all cores
// together then read 7 to 11 % faster, on Zen 5 and on Emerald Rapids.
void read(const uint8_t* data, size_t bytes, uint32_t* bits) {
    U32 seen[4];
    unrolled<4>([&](auto i) { seen[i.value] = set_u32(0); });
    for (size_t at = 0; at < bytes; at += 256)
        unrolled<4>([&](auto i) {
            const uint8_t* line = data + at + 64 * i.value;
            __builtin_prefetch(line + kAheadBytes);
            seen[i.value] = bit_or(seen[i.value], load_u32(line));
        });
    store_u32(bits, bit_or(bit_or(seen[0], seen[1]), bit_or(seen[2], seen[3])));
}
