// Matrix tiles of 16 rows of 64 bytes: AMX's, or emulated in plain C++, so that the code built on them can be tested on
// any CPU. Intel's Software Developer's Manual, TDPBF16PS: c[m][n] += sum over k of a[m][k] * b[k / 2][n][k % 2], with
// a and b bfloat16.
#pragma once

constexpr bool kTiles = true;
constexpr int kTileRows = 16, kTileBytes = kTileRows * kLineBytes, kTileColumns = 32;  // columns: of bfloat16

#ifdef __AMX_BF16__

struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// After shape(), tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights; after shape_six(), 0 to 5 are sums, 6
// activations, 7 weights. first_rows, second_rows: rows of the first and second half of activations and their sums.
struct Tiles {
    ~Tiles() { _tile_release(); }
    void shape(int first_rows, int second_rows) {
        configure({first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kTileRows, kTileRows});
    }
    void shape_six(int rows) { configure({rows, rows, rows, rows, rows, rows, rows, kTileRows}); }
    // shape() for products of 16 columns.
    void shape_halves(int first_rows, int second_rows) {
        configure(
            {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kTileRows / 2, kTileRows / 2},
            kLineBytes / 2);
    }
    // Inline assembly: the compilers' intrinsics need literal tile numbers.
    template <int tile>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(tile));
    }
    template <int tile>
    void load(const void* p) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(size_t(kLineBytes)), "i"(tile) : "memory");
    }
    template <int tile>
    void store(float* p) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(size_t(kLineBytes)), "i"(tile) : "memory");
    }
    template <int sum, int a, int b>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
    }

  private:
    // of_x: bytes per row of activations.
    static void configure(const int (&rows)[8], int of_x = kLineBytes) {
        TileConfig config;
        for (int i = 0; i < 8; ++i) config.row_bytes[i] = kLineBytes, config.rows[i] = uint8_t(rows[i]);
        config.row_bytes[4] = config.row_bytes[5] = uint16_t(of_x);
        // GCC's intrinsic declares that it reads only 8 bytes, so that the compiler drops the stores of the others.
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
};

#else

struct Tiles {
    int rows[8], of_x;  // of_x: columns of a product
    alignas(64) uint8_t data[8][kTileBytes];

    void shape(int first_rows, int second_rows) {
        configure({first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kTileRows, kTileRows});
    }
    void shape_six(int count) { configure({count, count, count, count, count, count, count, kTileRows}); }
    void shape_halves(int first_rows, int second_rows) {
        configure(
            {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kTileRows / 2, kTileRows / 2},
            kTileColumns / 2);
    }
    template <int tile>
    void zero() {
        __builtin_memset(data[tile], 0, kTileBytes);
    }
    template <int tile>
    void load(const void* p) {
        __builtin_memcpy(data[tile], p, size_t(rows[tile]) * kLineBytes);
    }
    template <int tile>
    void store(float* p) {
        __builtin_memcpy(p, data[tile], size_t(rows[tile]) * kLineBytes);
    }
    template <int sum, int a, int b>
    void multiply() {
        float x[kTileColumns], w[kTileRows][kTileColumns];  // w: [column of the product][k]
        for (int k = 0; k < of_x; ++k)
            for (int n = 0; n < kTileRows; ++n) w[n][k] = value(data[b], k / 2 * kTileColumns + 2 * n + k % 2);
        for (int m = 0; m < rows[sum]; ++m) {
            for (int k = 0; k < of_x; ++k) x[k] = value(data[a], m * kTileColumns + k);
            for (int n = 0; n < kTileRows; ++n) {
                float total;
                __builtin_memcpy(&total, data[sum] + (m * kTileRows + n) * sizeof total, sizeof total);
                for (int k = 0; k < of_x; ++k) total += x[k] * w[n][k];
                __builtin_memcpy(data[sum] + (m * kTileRows + n) * sizeof total, &total, sizeof total);
            }
        }
    }

  private:
    void configure(const int (&counts)[8], int columns = kTileColumns) {
        __builtin_memcpy(rows, counts, sizeof rows), of_x = columns;
    }
    static float value(const uint8_t* tile, int i) {
        uint16_t bits;
        __builtin_memcpy(&bits, tile + 2 * i, sizeof bits);
        return bf16_value(bits);
    }
};

#endif
