// Paged attention against float64: both algorithms of the kernels, splits, windows, sinks, odd sizes, any pool.

#include "attention.h"

#include <algorithm>
#include <cstdio>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "operations.h"

using namespace testing;

namespace {

struct Case {
    std::vector<int32_t> q_lens, kv_lens;
    int heads, kv_heads, key_dim, value_dim, page_tokens, window;
    bool sinks;
    proa::KvType type = proa::KvType::kBf16;
};

constexpr proa::KvType kE4m3 = proa::KvType::kE4m3;

const Case kCases[] = {
    {{1, 1, 1}, {1, 7, 33}, 4, 4, 16, 16, 4, 0, false},
    {{1, 1}, {1000, 517}, 3, 1, 80, 80, 16, 0, false},
    {{1, 6, 1, 11, 0}, {20, 6, 5, 27, 0}, 6, 2, 64, 64, 16, 4, false},
    {{0, 1, 0, 150}, {0, 3, 9, 150}, 4, 2, 128, 128, 1, 0, true},
    {{70, 2, 5}, {333, 400, 700}, 3, 3, 96, 96, 16, 100, true},
    {{1}, {4099}, 8, 2, 64, 64, 16, 0, true},     // split keys
    {{3}, {2500}, 4, 4, 128, 128, 64, 0, false},  // several rows that do not see the same keys, split
    {{1, 1}, {3000, 40}, 4, 4, 128, 128, 16, 1500, true},
    {{8}, {3000}, 4, 2, 128, 128, 16, 0, true},  // panels, split
    {{1, 9}, {65, 9}, 2, 1, 8, 8, 1, 0, false},
    {{2, 17}, {129, 130}, 2, 2, 24, 40, 16, 0, false},
    {{1, 40}, {200, 200}, 2, 1, 72, 16, 16, 7, true},
    {{1, 5}, {130, 130}, 2, 1, 192, 128, 16, 0, false},
    {{1, 5}, {130, 130}, 1, 1, 256, 512, 16, 0, false},
    {{2, 5}, {70, 70}, 16, 1, 576, 512, 16, 0, false},
    {{1, 3, 1}, {700, 70, 5}, 16, 1, 576, 512, 16, 0, false},  // few rows in panels, split
    {{4, 7}, {70, 70}, 130, 1, 8, 16, 16, 0, false},           // a group beyond a block of rows
    {{300}, {300}, 1, 1, 64, 64, 16, 0, true},                 // several blocks of rows
    // Dimensions of heads that are not multiples of 8.
    {{1, 1, 9}, {1000, 517, 40}, 3, 1, 100, 100, 16, 0, false},
    {{1, 40}, {200, 200}, 6, 3, 20, 20, 7, 7, true},
    {{2, 17}, {129, 130}, 2, 2, 6, 10, 16, 0, false},
    {{8}, {3000}, 4, 2, 34, 62, 16, 0, true},
    // Caches in e4m3.
    {{1, 6, 40}, {1000, 517, 40}, 3, 3, 100, 100, 16, 0, false, kE4m3},
    {{2, 17}, {129, 130}, 6, 3, 22, 34, 16, 0, false, kE4m3},
    {{1, 1}, {1000, 517}, 3, 1, 80, 80, 16, 0, false, kE4m3},
    {{1, 6, 1, 11, 0}, {20, 6, 5, 27, 0}, 6, 2, 64, 64, 16, 4, true, kE4m3},
    {{1}, {4099}, 8, 2, 64, 64, 16, 0, true, kE4m3},
    {{8, 1, 2}, {3000, 31, 33}, 4, 2, 128, 128, 16, 0, true, kE4m3},
    {{1, 9}, {65, 9}, 2, 1, 8, 8, 1, 0, false, kE4m3},
    {{2, 17}, {129, 130}, 6, 3, 24, 40, 16, 0, false, kE4m3},
    {{2, 5}, {70, 70}, 16, 1, 576, 512, 16, 0, false, kE4m3},
};

// Processors convert subnormal float16 regardless of MXCSR's flags for subnormals; QEMU 7 flushes them if a flag is
// set, which breaks AVX2's conversion of e4m3.
#if defined(__x86_64__)
__attribute__((target("f16c"))) bool widens_subnormals() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    volatile int16_t smallest = 1;
    const float wide = _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16(smallest)));
    _mm_setcsr(before);
    return wide != 0;
}
bool keeps_subnormals() { return !__builtin_cpu_supports("f16c") || widens_subnormals(); }
#else
bool keeps_subnormals() { return true; }
#endif

// A filled cache whose unused slots hold NaN, and queries in rows that are wider than necessary.
struct Problem {
    const Case& c;
    int rows = 0, most_pages = 0, pages = 0;
    std::vector<std::vector<float>> keys, values;  // by sequence; dequantised from the cache
    std::vector<uint8_t> cached_keys, cached_values;
    std::vector<uint16_t> queries;
    std::vector<int32_t> table;
    std::vector<float> sinks;
    int64_t q_stride, out_stride;
    float scale;

    explicit Problem(const Case& made_of, Random& random) : c(made_of) {
        for (size_t s = 0; s < c.q_lens.size(); ++s) {
            rows += c.q_lens[s];
            most_pages = std::max(most_pages, (c.kv_lens[s] + c.page_tokens - 1) / c.page_tokens);
        }
        pages = most_pages * int(c.q_lens.size()) + 3;
        q_stride = c.heads * c.key_dim + 24, out_stride = c.heads * c.value_dim + 8;
        scale = 1 / std::sqrt(float(c.key_dim));
        queries = random.rows(size_t(rows) * size_t(q_stride), 2);
        if (c.sinks) sinks = random.floats(size_t(c.heads), 3);
        const size_t slots = size_t(pages) * size_t(c.page_tokens) * size_t(c.kv_heads);
        cached_keys.assign(slots * size_t(c.key_dim * elem_bytes()), 0xff);  // NaN in either type
        cached_values.assign(slots * size_t(c.value_dim * elem_bytes()), 0xff);
        for (int i = 0; i < most_pages * int(c.q_lens.size()); ++i) table.push_back(i);
        for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[size_t(random.below(int(i)))]);
        for (size_t s = 0; s < c.q_lens.size(); ++s) fill(s, random);
    }

    proa::KvPages cache() {
        return {cached_keys.data(),
                cached_values.data(),
                int64_t(c.kv_heads) * c.key_dim,
                int64_t(c.kv_heads) * c.value_dim,
                pages,
                c.page_tokens,
                c.kv_heads,
                c.key_dim,
                c.value_dim,
                c.type,
                c.type == kE4m3 ? 0.37f : 1,
                c.type == kE4m3 ? 1.7f : 1};
    }
    int elem_bytes() const { return c.type == kE4m3 ? 1 : 2; }

    // Reads the cache's rows at `slots`, dequantised, in order.
    std::vector<float> read(const std::vector<uint8_t>& cached, const std::vector<int64_t>& slots, int width,
                            float scale) const {
        std::vector<float> out;
        for (const int64_t slot : slots)
            for (int i = 0; i < width; ++i) {
                const uint8_t* at = cached.data() + (slot * width + i) * elem_bytes();
                out.push_back(c.type == kE4m3 ? e4m3(*at) * scale : value(uint16_t(at[0] | at[1] << 8)));
            }
        return out;
    }

    void fill(size_t s, Random& random) {
        const int n = c.kv_lens[s];
        const std::vector<uint16_t> new_keys = random.rows(size_t(n * c.kv_heads * c.key_dim));
        const std::vector<uint16_t> new_values = random.rows(size_t(n * c.kv_heads * c.value_dim));
        std::vector<int64_t> slots;
        for (int i = 0; i < n; ++i)
            slots.push_back(int64_t(table[s * size_t(most_pages) + size_t(i / c.page_tokens)]) * c.page_tokens +
                            i % c.page_tokens);
        proa::Host host(pool_options(0), proa::kScalarKernels);
        const proa::WriteKv write{{new_keys.data(), c.kv_heads * c.key_dim},
                                  {new_values.data(), c.kv_heads * c.value_dim},
                                  slots.data(),
                                  cache()};
        proa::run(write, host, n, 0);
        if (c.type == kE4m3 && !keeps_subnormals())
            for (std::vector<uint8_t>* cached : {&cached_keys, &cached_values})
                for (uint8_t& code : *cached) code = code & 0x78 ? code : 0;
        keys.push_back(read(cached_keys, slots, c.kv_heads * c.key_dim, cache().key_scale));
        values.push_back(read(cached_values, slots, c.kv_heads * c.value_dim, cache().value_scale));
    }

    std::vector<uint16_t> solve(proa::Host& host) {
        std::vector<uint16_t> out(size_t(rows) * size_t(out_stride), 0x1234);
        proa::AttentionBatch batch(int(c.q_lens.size()) + 2, most_pages + 1);
        batch.set(int(c.q_lens.size()), c.q_lens.data(), c.kv_lens.data(), table.data(), most_pages, pages,
                  c.page_tokens);
        const proa::Attention op{
            {queries.data(), q_stride},      {out.data(), out_stride}, cache(), &batch, c.heads, c.window, scale,
            c.sinks ? sinks.data() : nullptr};
        proa::run(op, host, rows, 1);
        std::vector<uint16_t> again = out;
        proa::run(op, host, rows, 1);
        CHECK(out == again);
        host.pool.settle();
        return out;
    }
};

// One row and head in float64: the output, and the bound of its error.
struct Truth {
    std::vector<double> want, bound;

    Truth(const Problem& p, size_t s, int row, int position, int head) {
        const Case& c = p.c;
        const int first = c.window ? std::max(0, position - c.window + 1) : 0, kv = head / (c.heads / c.kv_heads);
        std::vector<double> scores;
        double terms = 0, most = c.sinks ? double(p.sinks[size_t(head)]) : -INFINITY, least = INFINITY;
        for (int j = first; j <= position; ++j) {
            double sum = 0, size = 0;
            for (int d = 0; d < c.key_dim; ++d) {
                const double product =
                    double(value(p.queries[size_t(row) * size_t(p.q_stride) + size_t(head * c.key_dim + d)])) *
                    double(p.keys[s][size_t((j * c.kv_heads + kv) * c.key_dim + d)]);
                sum += product, size += std::abs(product);
            }
            scores.push_back(sum * p.scale);
            terms = std::max(terms, size * p.scale);
            most = std::max(most, scores.back()), least = std::min(least, scores.back());
        }
        double total = c.sinks ? std::exp(p.sinks[size_t(head)] - most) : 0;
        for (double& x : scores) total += x = std::exp(x - most);
        const double n = double(scores.size());
        // A score is a sum of key_dim products. The error of its weight is twice the score's, plus that of exp (2
        // units, and the rounding of its argument), plus one rounding per block of keys for rescaling.
        const double weight = 2 * terms * (c.key_dim + 4) * kEps32 + (most - least + 4) * kEps32 * (n / 64 + 3);
        // Panels round the weights to bfloat16, in the numerator and in the sum below it.
        const bool panels = c.q_lens[s] > 4 || (c.kv_heads == 1 && c.q_lens[s] * c.heads >= 16);
        const double relative = 2 * weight + (panels ? 2 * kRound16 * 1.01 : 0) + 2 * (n + 8) * kEps32;
        for (int d = 0; d < c.value_dim; ++d) {
            double sum = 0, size = 0;
            for (size_t j = 0; j < scores.size(); ++j) {
                const double v = double(
                    p.values[s][(size_t(first) + j) * size_t(c.kv_heads * c.value_dim) + size_t(kv * c.value_dim + d)]);
                sum += scores[j] * v / total, size += scores[j] * std::abs(v) / total;
            }
            want.push_back(sum), bound.push_back(size * relative + stored(sum));
        }
    }
};

void attention_is_right(const Case& c, Random& random) {
    Problem p(c, random);
    std::vector<Truth> truths;
    int row = 0;
    for (size_t s = 0; s < c.q_lens.size(); ++s)
        for (int t = 0; t < c.q_lens[s]; ++t, ++row)
            for (int head = 0; head < c.heads; ++head)
                truths.emplace_back(p, s, row, c.kv_lens[s] - c.q_lens[s] + t, head);
    const auto solve = [&](proa::Host& host) { return p.solve(host); };
    on_everything(solve, [&](const std::vector<uint16_t>& out) {
        for (int r = 0; r < p.rows; ++r) {
            const uint16_t* got = out.data() + r * p.out_stride;
            for (int i = 0; i < c.heads * c.value_dim; ++i) {
                const Truth& truth = truths[size_t(r * c.heads + i / c.value_dim)];
                CHECK(within(value(got[i]), truth.want[size_t(i % c.value_dim)], truth.bound[size_t(i % c.value_dim)]));
            }
            for (int64_t i = c.heads * c.value_dim; i < p.out_stride; ++i) CHECK(got[i] == 0x1234);
        }
    });
}

// Reuses the same objects for many steps, as a recorded program does: lengths grow, sequences come and go.
void steps_follow_one_another() {
    const Case big{{1, 1, 90}, {2000, 90, 95}, 4, 2, 64, 64, 16, 0, false};
    const Case small{{1, 3}, {11, 2999}, 4, 2, 64, 64, 16, 0, false};
    Random random(5);
    Problem one(big, random), two(small, random);
    on_everything([&](proa::Host& host) {
        proa::AttentionBatch batch(8, 200);
        std::vector<uint16_t> out(size_t(100) * 256), all;
        proa::Attention op{{}, {out.data(), 256}, {}, &batch, 4, 0, one.scale, nullptr};
        for (int step = 0; step < 6; ++step) {
            Problem& p = step % 2 ? two : one;
            host.pool.settle();  // unlike a program, this test moves the rows
            op.q = {p.queries.data(), p.q_stride}, op.cache = p.cache();
            batch.set(int(p.c.q_lens.size()), p.c.q_lens.data(), p.c.kv_lens.data(), p.table.data(), p.most_pages,
                      p.pages, 16);
            proa::run(op, host, p.rows, 0);
            const std::vector<uint16_t> separate = p.solve(host);
            for (int row = 0; row < p.rows; ++row)
                CHECK(!std::memcmp(out.data() + row * 256, separate.data() + row * p.out_stride, 512));
            all.insert(all.end(), out.begin(), out.begin() + p.rows * 256);
        }
        return all;
    });
}

void wrong_batches_are_refused() {
    proa::AttentionBatch batch(2, 4);
    const int32_t q[] = {1, 1, 1}, kv[] = {3, 64, 5}, table[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    const auto refused = [&](int sequences, const int32_t* q_lens, const int32_t* kv_lens, int pages) {
        try {
            batch.set(sequences, q_lens, kv_lens, table, 4, pages, 16);
        } catch (const proa::Error& error) {
            return error.code() == PROA_ERROR_ARGUMENT;
        }
        return false;
    };
    const int32_t negative[] = {-1, 1}, longer[] = {3, 65}, shorter[] = {0, 64};
    CHECK(!refused(2, q, kv, 8));
    CHECK(refused(3, q, kv, 12));
    CHECK(refused(2, negative, kv, 8));
    CHECK(refused(2, q, longer, 8));
    CHECK(refused(2, q, shorter, 8));
    CHECK(refused(2, q, kv, 7));
    CHECK(batch.rows() == 2 && batch.kv_len(1) == 64);
}

}  // namespace

int main() {
    if (!keeps_subnormals())
        std::fprintf(stderr, "without subnormal e4m3 values: this machine flushes subnormal float16\n");
    Random random(1);
    for (const Case& c : kCases) attention_is_right(c, random);
    steps_follow_one_another();
    wrong_batches_are_refused();
}
