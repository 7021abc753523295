// Sums in matrix tiles: products of one to three bfloat16 panels with one block of up to 32 tokens. Never: expanding
// weights.
#pragma once

constexpr int kTilePanels = 3;  // most panels that are multiplied with the same activations at once

struct NothingAhead {
    void step() {}
};

// Functions for a number of panels and of tokens (more than 16 tokens take two rows of tiles); choose once, then call.
struct TileSums {
    int panels;
    void (*shape)(Tiles& tiles, int tokens);
    void (*clear)(Tiles& tiles);
    // Adds `steps` times 32 columns (half tiles: 16) from step `first` of the activations on. w: the panels' tiles,
    // `stride` bytes apart.
    void (*add)(Tiles& tiles, const uint8_t* w, size_t stride, const PackedBlock& x, int first, int steps,
                NothingAhead);
    void (*add_ahead)(Tiles& tiles, const uint8_t* w, size_t stride, const PackedBlock& x, int first, int steps,
                      Ahead& ahead);
    void (*store)(Tiles& tiles, int tokens, float* out, size_t stride);  // [panels][tokens][16]
};

// One or two panels. Tiles 4 and 5 are activations, 6 and 7 weights; with two rows of tiles, 0 and 1 are the sums of
// the first row and 2 and 3 of the second; otherwise sums begin at tile `at`.
template <int panels, bool two_rows, bool halves = false, int at = 0>
struct FewPanels {
    static void shape(Tiles& tiles, int tokens) {
        const int first = two_rows ? kTileRows : tokens, second = two_rows ? tokens - kTileRows : tokens;
        halves ? tiles.shape_halves(first, second) : tiles.shape(first, second);
    }
    static void clear(Tiles& tiles) {
        unrolled<panels>([&](auto p) {
            tiles.zero<at + p.value>();
            if constexpr (two_rows) tiles.zero<2 + p.value>();
        });
    }
    template <class Fetch = NothingAhead>
    static void add(Tiles& tiles, const uint8_t* w, size_t stride, const PackedBlock& x, int first, int steps,
                    Fetch ahead) {
        auto local = ahead;  // a local copy: the compiler assumes that every tile load may write memory
        constexpr int parts = halves ? 2 : 1;
        for (int k = first; k < first + steps; ++k, w += kTileBytes / parts) {
            const size_t half = size_t(k % parts) * kLineBytes / 2;
            tiles.load<4>(x.line(k / parts, 0) + half);
            if constexpr (two_rows) tiles.load<5>(x.line(k / parts, kTileRows) + half);
            unrolled<panels>([&](auto p) {
                tiles.load<6 + p.value>(w + p.value * stride);
                tiles.multiply<at + p.value, 4, 6 + p.value>();
                if constexpr (two_rows) tiles.multiply<2 + p.value, 5, 6 + p.value>();
            });
            local.step();
        }
        ahead = local;
    }
    static void store(Tiles& tiles, int, float* out, size_t stride) {
        unrolled<panels>([&](auto p) {
            tiles.store<at + p.value>(out + p.value * stride);
            if constexpr (two_rows) tiles.store<2 + p.value>(out + p.value * stride + kTileRows * 16);
        });
    }
    static constexpr TileSums kTable = {panels, shape, clear, add<>, add<Ahead&>, store};
};

// Three panels, six sums: fewer tile loads from L2 per product than with four sums. Both halves of the tokens have the
// same number of rows: with an odd number of tokens they share one.
template <bool two_rows>
struct ThreePanels {
    static int rows(int tokens) { return two_rows ? (tokens + 1) / 2 : tokens; }
    static void shape(Tiles& tiles, int tokens) { tiles.shape_six(rows(tokens)); }
    static void clear(Tiles& tiles) {
        tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>(), tiles.zero<4>(), tiles.zero<5>();
    }
    template <class Fetch = NothingAhead>
    static void add(Tiles& tiles, const uint8_t* w, size_t stride, const PackedBlock& block, int first, int steps,
                    Fetch ahead) {
        auto local = ahead;
        const uint8_t* x = block.line(first, 0);
        const uint8_t* second = block.line(first, block.size - rows(block.size));
        const size_t step = size_t(block.size) * kLineBytes;
        for (int k = 0; k < steps; ++k, w += kTileBytes, x += step, second += step) {
            tiles.load<7>(w);
            tiles.load<6>(x);
            tiles.multiply<0, 6, 7>();
            if constexpr (two_rows) {
                tiles.load<6>(second);
                tiles.multiply<1, 6, 7>();
            }
            tiles.load<7>(w + stride);
            if constexpr (two_rows) {
                tiles.multiply<3, 6, 7>();
                tiles.load<6>(x);
            }
            tiles.multiply<2, 6, 7>();
            tiles.load<7>(w + 2 * stride);
            tiles.multiply<4, 6, 7>();
            if constexpr (two_rows) {
                tiles.load<6>(second);
                tiles.multiply<5, 6, 7>();
            }
            local.step();
        }
        ahead = local;
    }
    static void store(Tiles& tiles, int tokens, float* out, size_t stride) {
        tiles.store<0>(out), tiles.store<2>(out + stride), tiles.store<4>(out + 2 * stride);
        if constexpr (two_rows) {
            float* second = out + (tokens - rows(tokens)) * 16;
            tiles.store<1>(second), tiles.store<3>(second + stride), tiles.store<5>(second + 2 * stride);
        }
    }
    static constexpr TileSums kTable = {3, shape, clear, add<>, add<Ahead&>, store};
};

inline const TileSums& tile_sums(int panels, bool two_rows) {
    static constexpr const TileSums* kAll[kTilePanels][2] = {
        {&FewPanels<1, false>::kTable, &FewPanels<1, true>::kTable},
        {&FewPanels<2, false>::kTable, &FewPanels<2, true>::kTable},
        {&ThreePanels<false>::kTable, &ThreePanels<true>::kTable},
    };
    return *kAll[panels - 1][two_rows];
}

// The functions for one or two panels and one row of tiles, for alternating use: one set of sums is stored while the
// other is added to.
inline const TileSums& tile_sums_in_turn(int panels, bool halves, int turn) {
    static constexpr const TileSums* kAll[2][2][2] = {
        {{&FewPanels<1, false>::kTable, &FewPanels<1, false, false, 2>::kTable},
         {&FewPanels<1, false, true>::kTable, &FewPanels<1, false, true, 2>::kTable}},
        {{&FewPanels<2, false>::kTable, &FewPanels<2, false, false, 2>::kTable},
         {&FewPanels<2, false, true>::kTable, &FewPanels<2, false, true, 2>::kTable}},
    };
    return *kAll[panels - 1][halves][turn];
}
