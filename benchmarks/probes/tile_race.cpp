// What does a product of matrix tiles wait for? Loops over bfloat16 panels of 16 rows and packed tokens, by all threads
// at once, as shares of what the same threads do on registers in the same moment.
//
//   g++ -O3 -std=c++20 -march=sapphirerapids -fopenmp -I csrc/src benchmarks/probes/tile_race.cpp -o tile_race
//   OMP_PROC_BIND=true OMP_NUM_THREADS=15 ./tile_race [GiB]
//
// Operands come from L1, from L2, or the weights from RAM: GiB of them, of which each thread has its own part. Without
// AMX it runs on the plain tiles of csrc, slowly, which only shows that all loops compute the same.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "layout.h"

namespace {

using proa::kLineBytes;
[[maybe_unused]] float bf16_value(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

#include "kernels/tiles.h"

constexpr int kBlockTokens = 32;
constexpr size_t kHugeBytes = size_t(2) << 20, kScratchBytes = size_t(4) << 20;

// `panels` panels times `tokens` tokens in blocks of 32, each 32 columns by 32 columns, `rounds` times over.
struct Job {
    const uint8_t *w, *x;
    float* out;  // [panels][tokens][16]
    int panels, tokens, columns, rounds;

    int steps() const { return columns / kTileColumns; }
    int blocks() const { return tokens / kBlockTokens; }
    size_t panel_bytes() const { return size_t(columns) * 32; }
    const uint8_t* panel(int i) const { return w + size_t(i) * panel_bytes(); }
    const uint8_t* block(int i) const { return x + size_t(i) * kBlockTokens * columns * 2; }
    float* sums(int panel, int block) const {
        return out + (size_t(panel) * tokens + size_t(block) * kBlockTokens) * 16;
    }
    double flops() const { return 2. * panels * 16 * tokens * columns * rounds; }
};

// Panels that come next, fetched into L2 a little with each step.
template <bool fetch>
struct Ahead {
    const uint8_t *at, *end;
    int lines;

    Ahead(const Job& job, int first, int count)
        : at(job.panel(first)),
          end(job.panel(std::min(first + count, job.panels))),
          lines(int(count * job.panel_bytes() / kLineBytes) / (job.blocks() * job.steps() * job.rounds) + 1) {}
    void step() {
        for (int i = 0; fetch && i < lines && at < end; ++i, at += kLineBytes) __builtin_prefetch(at, 0, 2);
    }
};

// Two panels and 32 tokens: four tiles loaded for four products.
template <bool fetch, bool products = true>
void four_sums(const Job& job) {
    Tiles tiles;
    tiles.shape(kTileRows, kTileRows);
    for (int p = 0; p < job.panels; p += 2) {
        Ahead<fetch> ahead(job, p + 2, 2);
        for (int b = 0; b < job.blocks(); ++b) {
            tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
            for (int i = 0; i < job.steps() * job.rounds; ++i) {
                const size_t k = size_t(i % job.steps());
                const uint8_t* x = job.block(b) + k * 2 * kTileBytes;
                tiles.load<6>(job.panel(p) + k * kTileBytes), tiles.load<4>(x);
                if (products) tiles.multiply<0, 4, 6>();
                tiles.load<7>(job.panel(p + 1) + k * kTileBytes);
                if (products) tiles.multiply<1, 4, 7>();
                tiles.load<5>(x + kTileBytes);
                if (products) tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
                ahead.step();
            }
            float *first = job.sums(p, b), *second = job.sums(p + 1, b);
            tiles.store<0>(first), tiles.store<1>(second), tiles.store<2>(first + 256), tiles.store<3>(second + 256);
        }
    }
}

// Three panels and 32 tokens: seven tiles loaded for six products, two of them again.
template <bool fetch>
void six_sums(const Job& job) {
    Tiles tiles;
    tiles.shape_six(kTileRows);
    for (int p = 0; p < job.panels; p += 3) {
        Ahead<fetch> ahead(job, p + 3, 3);
        for (int b = 0; b < job.blocks(); ++b) {
            tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>(), tiles.zero<4>(), tiles.zero<5>();
            for (int i = 0; i < job.steps() * job.rounds; ++i) {
                const size_t k = size_t(i % job.steps());
                const uint8_t *x = job.block(b) + k * 2 * kTileBytes, *w = job.panel(p) + k * kTileBytes;
                tiles.load<7>(w), tiles.load<6>(x), tiles.multiply<0, 6, 7>();
                tiles.load<6>(x + kTileBytes), tiles.multiply<1, 6, 7>();
                tiles.load<7>(w + job.panel_bytes()), tiles.multiply<3, 6, 7>();
                tiles.load<6>(x), tiles.multiply<2, 6, 7>();
                tiles.load<7>(w + 2 * job.panel_bytes()), tiles.multiply<4, 6, 7>();
                tiles.load<6>(x + kTileBytes), tiles.multiply<5, 6, 7>();
                ahead.step();
            }
            tiles.store<0>(job.sums(p, b)), tiles.store<1>(job.sums(p, b) + 256);
            tiles.store<2>(job.sums(p + 1, b)), tiles.store<3>(job.sums(p + 1, b) + 256);
            tiles.store<4>(job.sums(p + 2, b)), tiles.store<5>(job.sums(p + 2, b) + 256);
        }
    }
}

void on_registers(const Job& job) {
    Tiles tiles;
    tiles.shape(kTileRows, kTileRows);
    tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
    tiles.load<4>(job.x), tiles.load<5>(job.x), tiles.load<6>(job.w), tiles.load<7>(job.w);
    for (int i = 0; i < job.panels / 2 * job.blocks() * job.steps() * job.rounds; ++i) {
        tiles.multiply<0, 4, 6>(), tiles.multiply<1, 4, 7>();
        tiles.multiply<2, 5, 6>(), tiles.multiply<3, 5, 7>();
    }
    tiles.store<0>(job.out);
}

struct Loop {
    const char* name;
    void (*run)(const Job&);
};
constexpr Loop kLoops[] = {{"only loads, as if products", four_sums<true, false>},
                           {"four sums, none fetched", four_sums<false>},
                           {"four sums", four_sums<true>},
                           {"six sums, none fetched", six_sums<false>},
                           {"six sums", six_sums<true>}};

struct Case {
    const char* name;
    int panels, tokens, columns, rounds;
    bool from_ram;
};
constexpr Case kCases[] = {{"L1", 6, 32, 256, 96, false},
                           {"L2, 192 x 2048", 6, 192, 2048, 1, false},
                           {"RAM, 96 x 2048", 30, 96, 2048, 1, true},
                           {"RAM, 192 x 2048", 30, 192, 2048, 1, true},
                           {"RAM, 288 x 2048", 30, 288, 2048, 1, true},
                           {"RAM, 288 x 768", 30, 288, 768, 1, true}};

uint8_t* memory(size_t bytes) {
    void* at = mmap(nullptr, bytes + kHugeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::perror("mmap"), std::exit(1);
    auto* whole =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + kHugeBytes - 1) / kHugeBytes * kHugeBytes);
    madvise(whole, bytes, MADV_HUGEPAGE);
    return whole;
}

// Values of about 0.01 to 0.03 of either sign.
void fill(uint8_t* at, size_t bytes) {
    uint64_t state = 88172645463325252ull + reinterpret_cast<uintptr_t>(at);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const uint64_t values = (state & 0x80ff80ff80ff80ffull) | 0x3c003c003c003c00ull;
        std::memcpy(at + i, &values, sizeof values);
    }
}

[[maybe_unused]] bool allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // tiles, for all threads to come

// Operations per second of all threads.
double rate(const Loop& loop, const Case& c, uint8_t* weights, size_t bytes, const std::vector<uint8_t*>& scratch,
            double seconds) {
    double all = 0;
#pragma omp parallel reduction(+ : all)
    {
        const size_t thread = size_t(omp_get_thread_num()), threads = size_t(omp_get_num_threads());
        const size_t task = size_t(c.panels) * c.columns * 32, mine = bytes / threads / task;
        Job job{nullptr,  scratch[thread], reinterpret_cast<float*>(scratch[thread] + kScratchBytes / 2),
                c.panels, c.tokens,        c.columns,
                c.rounds};
#pragma omp barrier
        const double begin = omp_get_wtime();
        double done = 0;
        for (size_t i = 0; omp_get_wtime() - begin < seconds; ++i) {
            job.w = weights + (thread * mine + (c.from_ram ? i % mine : 0)) * task;
            loop.run(job);
            done += job.flops();
        }
        all += done / (omp_get_wtime() - begin);
    }
    return all;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

bool loops_agree(uint8_t* weights, uint8_t* scratch) {
    const int panels = 6, tokens = 64, columns = 96;
    std::vector<float> first(size_t(panels) * tokens * 16), other(first.size());
    four_sums<true>({weights, scratch, first.data(), panels, tokens, columns, 1});
    six_sums<true>({weights, scratch, other.data(), panels, tokens, columns, 1});
    return std::memcmp(first.data(), other.data(), first.size() * sizeof(float)) == 0;
}

}  // namespace

int main(int argc, char** argv) {
    const size_t bytes = size_t((argc > 1 ? std::atof(argv[1]) : 1) * (1ull << 30));
    const int threads = omp_get_max_threads();
#ifdef __AMX_BF16__
    if (!allowed()) return std::fprintf(stderr, "The system does not allow matrix tiles.\n"), 1;
#endif
    uint8_t* weights = memory(bytes);
    std::vector<uint8_t*> scratch(static_cast<size_t>(threads));
    for (uint8_t*& at : scratch) at = memory(kScratchBytes), fill(at, kScratchBytes);
#pragma omp parallel for
    for (size_t i = 0; i < bytes >> 20; ++i) fill(weights + (i << 20), 1 << 20);
    if (!loops_agree(weights, scratch[0])) return std::fprintf(stderr, "The loops do not agree.\n"), 1;
    const Loop peak{"registers", on_registers};
    std::printf("%d threads; share of the peak on registers, TFLOP/s\n%-28s", threads, "");
    for (const Case& c : kCases) std::printf(" %18s", c.name);
    for (const Loop& loop : kLoops) {
        std::printf("\n%-28s", loop.name);
        for (const Case& c : kCases) {
            std::vector<double> shares, rates;
            for (int round = 0; round < 3; ++round) {
                const double limit = rate(peak, kCases[0], weights, bytes, scratch, 0.02);
                rates.push_back(rate(loop, c, weights, bytes, scratch, 0.04)), shares.push_back(rates.back() / limit);
            }
            std::printf("   %6.1f %% %6.2f", median(shares) * 100, median(rates) / 1e12);
        }
        std::fflush(stdout);
    }
    std::printf("\n");
    return 0;
}
