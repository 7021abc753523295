// Which weight layout should experts have in RAM? Two candidates raced on the work they must do.
//
//   rows         a tile is 16 rows x 64 bytes, each row's bytes together: one line of cache holds one row
//   interleaved  a line holds 16 rows: 4 bytes of each (AMX's B operand order): one lane of a vector is one row
//
// int4 in groups of 32 (w = q * s + m) and nvfp4 (e2m1, groups of 16, e4m3 scales), activations bf16, sums float32.
// Also AMX bf16 GEMM with the weights as A operand (rows) or as B operand (interleaved), where the CPU has it.
//
//   g++ -O3 -march=native -fopenmp layout_race.cpp -o layout_race && OMP_PROC_BIND=true ./layout_race [GiB]
//
// Every kernel is checked against float64 first. Weights are random; the buffer is read whole, so no cache helps.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kRows = 16;  // of a panel
constexpr int kK = 2048;

float from_bf16(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---- int4, groups of 32: nibble order within 4 bytes is chosen so that shifting by 4 i leaves values i and i + 4 of
// eight in the two halves of a 32-bit lane. 0x4300 | q is the bfloat16 128 + q, exactly.

constexpr int kGroup4 = 32;
const __m512i kNibbles = _mm512_set1_epi32(0x000f000f);
const __m512i kMagic = _mm512_set1_epi32(0x43004300);

__m512bh nibble_pair(__m512i v, int i) {
    return (__m512bh)_mm512_ternarylogic_epi32(_mm512_srli_epi32(v, 4 * i), kNibbles, kMagic, 0xea);  // (a & b) | c
}

// w: K/8 lines, line j holds values 8 j .. 8 j + 7 of 16 rows. scales, mins: [K/32][16]. x: pairs (i, i + 4) of each
// eight. sums: of x over each group. 128 of the magic is taken back through the group's sum.
__attribute__((noinline)) void int4_interleaved(const uint8_t* w, const float* scales, const float* mins,
                                                const uint32_t* x, const float* sums, float* y) {
    __m512 acc = _mm512_setzero_ps();
    for (int g = 0; g < kK / kGroup4; ++g) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int j = 0; j < 4; ++j) {
            const __m512i v = _mm512_load_si512(w + (g * 4 + j) * 64);
            const uint32_t* p = x + (g * 4 + j) * 4;
            even = _mm512_dpbf16_ps(even, nibble_pair(v, 0), (__m512bh)_mm512_set1_epi32(p[0]));
            odd = _mm512_dpbf16_ps(odd, nibble_pair(v, 1), (__m512bh)_mm512_set1_epi32(p[1]));
            even = _mm512_dpbf16_ps(even, nibble_pair(v, 2), (__m512bh)_mm512_set1_epi32(p[2]));
            odd = _mm512_dpbf16_ps(odd, nibble_pair(v, 3), (__m512bh)_mm512_set1_epi32(p[3]));
        }
        const __m512 s = _mm512_loadu_ps(scales + g * 16), m = _mm512_loadu_ps(mins + g * 16);
        const __m512 sum = _mm512_set1_ps(sums[g]);
        acc = _mm512_fmadd_ps(s, _mm512_fnmadd_ps(sum, _mm512_set1_ps(128.f), _mm512_add_ps(even, odd)), acc);
        acc = _mm512_fmadd_ps(m, sum, acc);
    }
    _mm512_storeu_ps(y, acc);
}

// w: tiles of 16 rows x 64 bytes, tile t holds values 128 t .. 128 t + 127 of each row; shift i yields group i of the
// four. x: [tile][group][32] in the order in which a lane pair meets it. Scales are broadcast per row and group.
__attribute__((noinline)) void int4_rows(const uint8_t* w, const float* scales, const float* mins, const uint16_t* x,
                                         const float* sums, float* y) {
    __m512 acc[kRows];
    for (auto& a : acc) a = _mm512_setzero_ps();
    __m512 bias = _mm512_setzero_ps();  // over rows, once per group
    for (int t = 0; t < kK / 128; ++t) {
        __m512bh xs[4];
        for (int i = 0; i < 4; ++i) {
            const int g = t * 4 + i;
            xs[i] = (__m512bh)_mm512_loadu_si512(x + g * 32);
            const __m512 s = _mm512_loadu_ps(scales + g * 16), m = _mm512_loadu_ps(mins + g * 16);
            bias = _mm512_fmadd_ps(_mm512_fnmadd_ps(s, _mm512_set1_ps(128.f), m), _mm512_set1_ps(sums[g]), bias);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const __m512i v = _mm512_load_si512(w + t * 1024 + r * 64);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512 dot = _mm512_dpbf16_ps(_mm512_setzero_ps(), nibble_pair(v, i), xs[i]);
                acc[r] = _mm512_fmadd_ps(dot, _mm512_set1_ps(scales[(t * 4 + i) * 16 + r]), acc[r]);
            }
        }
    }
    _mm512_storeu_ps(y, bias);
    for (int r = 0; r < kRows; ++r) y[r] += _mm512_reduce_add_ps(acc[r]);
}

// ---- nvfp4: e2m1 codes are looked up as bfloat16. vpermw reads five bits of its index, so the table is doubled and
// the neighbour's lowest bit does no harm.

constexpr int kGroupNv = 16;

float e2m1(int code) {
    static const float magnitude[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

__m512i e2m1_table() {
    alignas(64) uint16_t words[32];
    for (int i = 0; i < 32; ++i) words[i] = to_bf16(e2m1(i & 15));
    return _mm512_load_si512(words);
}

// e4m3 without sign and special codes, all exact: its bits are a float16's, 2^8 too small. The conversion takes
// subnormal float16 at full speed; building a float32 from the bits would meet subnormals, 20 times slower.
__m512 e4m3(const uint8_t* scales) {
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)scales)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.f));
}

__attribute__((noinline)) void nvfp4_interleaved(const uint8_t* w, const uint8_t* scales, const uint32_t* x,
                                                 float* y) {
    const __m512i table = e2m1_table();
    __m512 acc = _mm512_setzero_ps();
    for (int g = 0; g < kK / kGroupNv; ++g) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        auto pair = [&](__m512i v, int i) {
            return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * i), table);
        };
        for (int j = 0; j < 2; ++j) {
            const __m512i v = _mm512_load_si512(w + (g * 2 + j) * 64);
            const uint32_t* p = x + (g * 2 + j) * 4;
            even = _mm512_dpbf16_ps(even, pair(v, 0), (__m512bh)_mm512_set1_epi32(p[0]));
            odd = _mm512_dpbf16_ps(odd, pair(v, 1), (__m512bh)_mm512_set1_epi32(p[1]));
            even = _mm512_dpbf16_ps(even, pair(v, 2), (__m512bh)_mm512_set1_epi32(p[2]));
            odd = _mm512_dpbf16_ps(odd, pair(v, 3), (__m512bh)_mm512_set1_epi32(p[3]));
        }
        acc = _mm512_fmadd_ps(_mm512_add_ps(even, odd), e4m3(scales + g * 16), acc);
    }
    _mm512_storeu_ps(y, acc);
}

// A vector of 32 values spans two groups of 16: the row's two scales are spread over the halves of the vector.
__attribute__((noinline)) void nvfp4_rows(const uint8_t* w, const uint8_t* scales, const uint16_t* x, float* y) {
    const __m512i table = e2m1_table();
    __m512 acc[kRows];
    for (auto& a : acc) a = _mm512_setzero_ps();
    for (int t = 0; t < kK / 128; ++t) {
        __m512bh xs[4];
        alignas(64) float s[8][16];
        for (int i = 0; i < 4; ++i) xs[i] = (__m512bh)_mm512_loadu_si512(x + (t * 4 + i) * 32);
        for (int g = 0; g < 8; ++g) _mm512_store_ps(s[g], e4m3(scales + (t * 8 + g) * 16));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const __m512i v = _mm512_load_si512(w + t * 1024 + r * 64);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512bh pair = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * i), table);
                const __m512 dot = _mm512_dpbf16_ps(_mm512_setzero_ps(), pair, xs[i]);
                const __m512 scale = _mm512_mask_broadcastss_ps(_mm512_set1_ps(s[2 * i][r]), 0xff00,
                                                                _mm_load_ss(&s[2 * i + 1][r]));
                acc[r] = _mm512_fmadd_ps(dot, scale, acc[r]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) y[r] = _mm512_reduce_add_ps(acc[r]);
}

// ---- one panel with everything a kernel needs, random, and its float64 answer

struct Panel {
    alignas(64) uint8_t w[kK * kRows / 2];
    float scales[kK / kGroup4 * 16], mins[kK / kGroup4 * 16], sums[kK / kGroup4];
    uint8_t scales8[kK / kGroupNv * 16];
    uint16_t x[kK], x_rows_int4[kK], x_rows_nv[kK];
    uint32_t x_pairs[kK / 2];
};

int code_interleaved(const Panel& p, int row, int k) {
    const uint32_t lane = *(const uint32_t*)(p.w + (k / 8) * 64 + row * 4);
    const int i = k % 8;  // value i < 4 stands at bit 4 i, value i + 4 at bit 16 + 4 i
    return (lane >> (i < 4 ? 4 * i : 16 + 4 * (i - 4))) & 15;
}

// In a row tile, group i of 32 values: value v of lane pair l (= v / 2) is at bit 4 i (even v) or 16 + 4 i (odd v).
int code_rows(const Panel& p, int row, int k) {
    const int tile = k / 128, i = k % 128 / 32, v = k % 32;
    const uint32_t lane = *(const uint32_t*)(p.w + tile * 1024 + row * 64 + v / 2 * 4);
    return (lane >> (4 * i + 16 * (v & 1))) & 15;
}

void fill(Panel& p) {
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    for (auto& b : p.w) b = uint8_t(rng());
    for (auto& s : p.scales) s = 0.01f + 0.01f * (rng() % 100);
    for (auto& m : p.mins) m = normal(rng);
    for (auto& s : p.scales8) s = uint8_t(rng() % 0x7e);
    for (auto& v : p.x) v = to_bf16(normal(rng));
    for (int g = 0; g < kK / kGroup4; ++g) {
        p.sums[g] = 0;
        for (int j = 0; j < kGroup4; ++j) p.sums[g] += from_bf16(p.x[g * kGroup4 + j]);
    }
    for (int e = 0; e < kK / 8; ++e)
        for (int i = 0; i < 4; ++i) p.x_pairs[e * 4 + i] = p.x[e * 8 + i] | uint32_t(p.x[e * 8 + i + 4]) << 16;
    std::copy(p.x, p.x + kK, p.x_rows_int4);
    std::copy(p.x, p.x + kK, p.x_rows_nv);
}

double error(const float* got, const double* want) {
    double off = 0, size = 0;
    for (int r = 0; r < kRows; ++r) off += (got[r] - want[r]) * (got[r] - want[r]), size += want[r] * want[r];
    return std::sqrt(off / size);
}

bool check(const Panel& p) {
    double want[4][kRows] = {};
    for (int r = 0; r < kRows; ++r)
        for (int k = 0; k < kK; ++k) {
            const double x = from_bf16(p.x[k]), s = p.scales[k / kGroup4 * 16 + r], m = p.mins[k / kGroup4 * 16 + r];
            const int code = p.scales8[k / kGroupNv * 16 + r];
            const double s8 = std::ldexp(code >> 3 ? 8 + (code & 7) : code & 7, std::max(code >> 3, 1) - 10);
            want[0][r] += x * (code_interleaved(p, r, k) * s + m);
            want[1][r] += x * (code_rows(p, r, k) * s + m);
            want[2][r] += x * e2m1(code_interleaved(p, r, k)) * s8;
            want[3][r] += x * e2m1(code_rows(p, r, k)) * s8;
        }
    float y[kRows];
    double worst = 0;
    auto note = [&](const char* name, int i) {
        std::printf("check %-18s relative error %.1e\n", name, error(y, want[i]));
        worst = std::max(worst, error(y, want[i]));
    };
    int4_interleaved(p.w, p.scales, p.mins, p.x_pairs, p.sums, y), note("int4 interleaved", 0);
    int4_rows(p.w, p.scales, p.mins, p.x_rows_int4, p.sums, y), note("int4 rows", 1);
    nvfp4_interleaved(p.w, p.scales8, p.x_pairs, y), note("nvfp4 interleaved", 2);
    nvfp4_rows(p.w, p.scales8, p.x_rows_nv, y), note("nvfp4 rows", 3);
    return worst < 1e-4;
}

// ---- timing

template <class F>
double median_s(F run, int times = 7) {
    std::vector<double> seconds;
    run();
    for (int i = 0; i < times; ++i) {
        const double begin = omp_get_wtime();
        run();
        seconds.push_back(omp_get_wtime() - begin);
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[times / 2];
}

uint8_t* random_buffer(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::exit(2);
    madvise(p, bytes, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < bytes / 8; ++i) ((uint64_t*)p)[i] = i * 0x9e3779b97f4a7c15ull ^ i << 29;
    return (uint8_t*)p;
}

volatile float sink;

// Panels are handed out 16 at a time (256 KiB): static halves would measure the slower core.
template <class F>
void race(const char* name, const uint8_t* buffer, size_t bytes, double read_s, F panel) {
    constexpr size_t kPanelBytes = sizeof(Panel::w);
    const long panels = long(bytes / kPanelBytes);
    const double from_ram = median_s([&] {
#pragma omp parallel for schedule(dynamic, 16)
        for (long i = 0; i < panels; ++i) {
            float y[kRows];
            panel(buffer + i * kPanelBytes, y);
            sink = y[0];
        }
    });
    const long cached = 16 * omp_get_max_threads(), rounds = 40;
    const double from_cache = median_s([&] {
#pragma omp parallel
        for (long round = 0; round < rounds; ++round)
            for (long i = 0; i < 16; ++i) {
                float y[kRows];
                panel(buffer + (omp_get_thread_num() * 16 + i) * kPanelBytes, y);
                sink = y[0];
            }
    });
    std::printf("%-18s from RAM %6.1f GB/s (%3.0f %% of reading)   from L2 %6.1f GB/s\n", name, bytes / from_ram / 1e9,
                100 * read_s / from_ram, double(cached) * rounds * kPanelBytes / from_cache / 1e9);
}

double read_seconds(const uint8_t* buffer, size_t bytes) {
    return median_s([&] {
#pragma omp parallel for schedule(dynamic, 1)
        for (long chunk = 0; chunk < long(bytes >> 20); ++chunk) {
            __m512i a = _mm512_setzero_si512(), b = a;
            for (size_t i = 0; i < 1 << 20; i += 128) {
                a = _mm512_xor_si512(a, _mm512_load_si512(buffer + (chunk << 20) + i));
                b = _mm512_xor_si512(b, _mm512_load_si512(buffer + (chunk << 20) + i + 64));
            }
            sink = float(_mm512_reduce_add_epi32(_mm512_xor_si512(a, b)));
        }
    });
}

#ifdef __AMX_BF16__
// C[tokens, rows] over K, tile by tile; `tokens` <= 16. Weights as B operand: a tile multiply costs as many cycles as
// there are tokens. Weights as A operand: always 16.
struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

void configure(int c_rows, int c_bytes, int a_rows, int b_bytes) {
    TileConfig config;
    for (int t = 0; t < 4; ++t) config.rows[t] = c_rows, config.column_bytes[t] = c_bytes;
    for (int t = 4; t < 6; ++t) config.rows[t] = a_rows, config.column_bytes[t] = 64;
    for (int t = 6; t < 8; ++t) config.rows[t] = 16, config.column_bytes[t] = b_bytes;
    _tile_loadconfig(&config);
}

void amx_race(const uint8_t* buffer, size_t bytes) {
    syscall(SYS_arch_prctl, 0x1023, 18);
    constexpr size_t kPanelBytes = size_t(kK) * kRows * 2;
    const long panels = long(bytes / kPanelBytes) & ~1;
    std::vector<uint16_t> x(16 * kK + 32);
    uint16_t* xs = (uint16_t*)((uintptr_t(x.data()) + 63) & ~uintptr_t(63));
    for (int i = 0; i < 16 * kK; ++i) xs[i] = to_bf16(0.01f * (i % 37));
    for (int tokens : {1, 2, 4, 8, 16}) {
        double seconds[2];
        for (int as_b = 0; as_b < 2; ++as_b)
            seconds[as_b] = median_s([&] {
#pragma omp parallel
                {
                    as_b ? configure(tokens, 64, tokens, 64) : configure(16, tokens * 4, 16, tokens * 4);
                    alignas(64) float c[256];
#pragma omp for schedule(dynamic, 4)
                    for (long p = 0; p < panels; p += 2) {
                        const uint8_t *w0 = buffer + p * kPanelBytes, *w1 = w0 + kPanelBytes;
                        _tile_zero(0);
                        _tile_zero(1);
                        for (int k = 0; k < kK / 32; ++k) {
                            if (as_b) {
                                _tile_loadd(4, xs + k * 512, 64);
                                _tile_loadd(6, w0 + k * 1024, 64);
                                _tile_dpbf16ps(0, 4, 6);
                                _tile_loadd(7, w1 + k * 1024, 64);
                                _tile_dpbf16ps(1, 4, 7);
                            } else {
                                _tile_loadd(6, xs + k * 512, 64);
                                _tile_loadd(4, w0 + k * 1024, 64);
                                _tile_dpbf16ps(0, 4, 6);
                                _tile_loadd(5, w1 + k * 1024, 64);
                                _tile_dpbf16ps(1, 5, 6);
                            }
                        }
                        _tile_stored(0, c, 64);
                        sink = c[0];
                        _tile_stored(1, c, 64);
                        sink = c[0];
                    }
                    _tile_release();
                }
            });
        std::printf("AMX bf16 %2d tokens   rows (A) %6.1f GB/s   interleaved (B) %6.1f GB/s\n", tokens,
                    bytes / seconds[0] / 1e9, bytes / seconds[1] / 1e9);
    }
}
#endif

}  // namespace

int main(int argc, char** argv) {
    static Panel p;
    fill(p);
    if (!check(p)) return 1;
    const size_t bytes = size_t((argc > 1 ? std::atof(argv[1]) : 2) * (1ull << 30)) & ~size_t((1 << 20) - 1);
    uint8_t* buffer = random_buffer(bytes);
    for (int round = 0; round < 2; ++round) {
        const double read_s = read_seconds(buffer, bytes);
        std::printf("%d threads, reading %.1f GB/s\n", omp_get_max_threads(), bytes / read_s / 1e9);
        race("int4 rows", buffer, bytes, read_s, [&](const uint8_t* w, float* y) {
            int4_rows(w, p.scales, p.mins, p.x_rows_int4, p.sums, y);
        });
        race("int4 interleaved", buffer, bytes, read_s, [&](const uint8_t* w, float* y) {
            int4_interleaved(w, p.scales, p.mins, p.x_pairs, p.sums, y);
        });
        race("nvfp4 rows", buffer, bytes, read_s,
             [&](const uint8_t* w, float* y) { nvfp4_rows(w, p.scales8, p.x_rows_nv, y); });
        race("nvfp4 interleaved", buffer, bytes, read_s,
             [&](const uint8_t* w, float* y) { nvfp4_interleaved(w, p.scales8, p.x_pairs, y); });
    }
#ifdef __AMX_BF16__
    amx_race(buffer, bytes);
#endif
    return 0;
}
