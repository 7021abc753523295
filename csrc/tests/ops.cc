// Operations on rows against float64: on views of wider rows, in place, for few rows (on the caller only) and many.

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string>

#include "operations.h"
#include "rows.h"

using namespace testing;

namespace {

struct Shape {
    int rows, groups, width;
};
const Shape kShapes[] = {{1, 1, 1}, {3, 1, 7}, {5, 3, 80}, {2, 1, 4096}, {300, 1, 576}, {700, 2, 129}};
constexpr int kGap = 5;  // elements between rows, which must not be written
constexpr uint16_t kUntouched = 0x1234;

// Rows with gaps, like a part of a fused output.
std::vector<uint16_t> with_gaps(const std::vector<uint16_t>& x, int width) {
    std::vector<uint16_t> out;
    for (size_t i = 0; i < x.size(); i += size_t(width)) {
        out.insert(out.end(), x.begin() + int64_t(i), x.begin() + int64_t(i) + width);
        out.insert(out.end(), kGap, kUntouched);
    }
    return out;
}

// Calls visit(row, column, value), and checks that the gaps are unchanged.
template <class Visit>
void each(const std::vector<uint16_t>& rows, int width, Visit&& visit) {
    const int stride = width + kGap;
    for (size_t i = 0; i < rows.size(); ++i) {
        const int column = int(i) % stride;
        if (column < width) {
            visit(int(i) / stride, column, double(value(rows[i])));
        } else {
            CHECK(rows[i] == kUntouched);
        }
    }
}

void rms_norm_is_right(const Shape& s, Random& random) {
    const int width = s.groups * s.width;
    const size_t count = size_t(s.rows) * size_t(width);
    const auto x = random.rows(count, 3), weight = random.rows(size_t(s.width));
    const float eps = 1e-6f;
    const auto compute = [&](proa::Host& host) {
        std::vector<uint16_t> in = with_gaps(x, width), out(in.size(), kUntouched);
        const bool in_place = s.groups > 1;
        const proa::ConstRows view{in.data(), width + kGap};
        const proa::Rows to{in_place ? in.data() : out.data(), width + kGap};
        run_once(proa::RmsNorm{view, weight.data(), s.groups, s.width, eps, to}, host, s.rows);
        return in_place ? in : out;
    };
    on_everything(compute, [&](const std::vector<uint16_t>& out) {
        std::vector<double> scale;
        for (size_t i = 0; i < count; i += size_t(s.width)) {
            double squares = 0;
            for (int k = 0; k < s.width; ++k) squares += std::pow(value(x[i + size_t(k)]), 2);
            scale.push_back(1 / std::sqrt(squares / s.width + eps));
        }
        each(out, width, [&](int row, int column, double got) {
            const double normed =
                value(x[size_t(row * width + column)]) * scale[size_t(row * s.groups + column / s.width)];
            const double want = value(weight[size_t(column % s.width)]) * normed;
            CHECK(within(got, want, std::abs(want) * (s.width / 2 + 8) * kEps32 + stored(want)));
        });
    });
}

void add_is_exact(const Shape& s, Random& random) {
    const int width = s.groups * s.width;
    const size_t count = size_t(s.rows) * size_t(width);
    const auto x = random.rows(count), y = random.rows(count);
    const auto compute = [&](proa::Host& host) {
        std::vector<uint16_t> out = with_gaps(x, width);
        run_once(proa::Add{{out.data(), width + kGap}, {y.data(), width}, width}, host, s.rows);
        return out;
    };
    on_everything(compute, [&](const std::vector<uint16_t>& out) {
        each(out, width, [&](int row, int column, double got) {
            const size_t at = size_t(row * width + column);
            CHECK(got == value(rounded(value(x[at]) + value(y[at]))));
        });
    });
}

void gated_add_is_right(const Shape& s, Random& random) {
    const int width = s.groups * s.width;
    const size_t count = size_t(s.rows) * size_t(width);
    const auto routed = random.rows(count), shared = random.rows(count), gate = random.rows(size_t(s.rows), 4);
    const auto compute = [&](proa::Host& host) {
        std::vector<uint16_t> out = with_gaps(routed, width);
        const proa::Rows view{out.data(), width + kGap};
        run_once(proa::GatedAdd{view, {gate.data(), 1}, {shared.data(), width}, width, view}, host, s.rows);
        return out;
    };
    on_everything(compute, [&](const std::vector<uint16_t>& out) {
        each(out, width, [&](int row, int column, double got) {
            const size_t at = size_t(row * width + column);
            const double sigmoid = 1 / (1 + std::exp(-double(value(gate[size_t(row)])))),
                         added = sigmoid * value(shared[at]);
            const double want = value(routed[at]) + added;
            // The sigmoid, the product and the sum are each rounded to bfloat16.
            const double before = 2.01 * std::abs(added) * kRound16;
            CHECK(within(got, want, before + stored(std::abs(want) + before) + 8 * kEps32));
        });
    });
}

void rotary_is_right(int rows, int heads, int dim, int half, bool interleaved, Random& random) {
    const int width = heads * dim;
    const auto x = random.rows(size_t(rows) * size_t(width));
    std::vector<float> angles = random.floats(size_t(rows) * size_t(half), 10), cos, sin;
    for (float angle : angles) cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
    const auto compute = [&](proa::Host& host) {
        std::vector<uint16_t> out = with_gaps(x, width);
        const proa::Rows view{out.data(), width + kGap};
        run_once(proa::Rotary{view, cos.data(), sin.data(), heads, dim, half, interleaved}, host, rows);
        return out;
    };
    on_everything(compute, [&](const std::vector<uint16_t>& out) {
        each(out, width, [&](int row, int column, double got) {
            const int head = column / dim, d = column % dim;
            const uint16_t* of = x.data() + row * width + head * dim;
            if (d >= 2 * half) {
                CHECK(got == value(of[d]));
                return;
            }
            const int i = interleaved ? d / 2 : d % half;
            const bool second = interleaved ? d % 2 : d >= half;
            const double a = value(of[interleaved ? 2 * i : i]), b = value(of[interleaved ? 2 * i + 1 : i + half]);
            const double c = cos[size_t(row * half + i)], s = sin[size_t(row * half + i)];
            const double want = second ? b * c + a * s : a * c - b * s;
            CHECK(within(got, want, (std::abs(a) + std::abs(b)) * 2 * kEps32 + stored(want)));
        });
    });
}

void embed_copies_rows(Random& random) {
    for (const int rows : {1, 4, 400}) {
        const int width = 576, vocabulary = 33;
        const auto table = random.rows(size_t(vocabulary * width));
        std::vector<int64_t> tokens(static_cast<size_t>(rows));
        for (int64_t& token : tokens) token = random.below(vocabulary);
        on_everything([&](proa::Host& host) {
            std::vector<uint16_t> out(size_t(rows) * size_t(width + kGap), kUntouched);
            const proa::Embed op{tokens.data(), table.data(), vocabulary, width, {out.data(), width + kGap}};
            run_once(op, host, rows);
            each(out, width, [&](int row, int column, double got) {
                CHECK(got == value(table[size_t(tokens[size_t(row)] * width + column)]));
            });
            return out;
        });
    }
}

template <class Run>
void is_refused(Run&& run) {
    int code = PROA_OK;
    try {
        run();
    } catch (const proa::Error& error) {
        code = error.code();
    }
    CHECK(code == PROA_ERROR_ARGUMENT);
}

void numbers_out_of_range_are_refused() {
    proa::Host host(pool_options(1), proa::kScalarKernels);
    std::vector<uint16_t> table(32, 1), out(32, kUntouched), cache(64, kUntouched);
    for (const int64_t bad : {int64_t(-1), int64_t(4), int64_t(1) << 40}) {
        const int64_t numbers[] = {0, bad};
        is_refused([&] { run_once(proa::Embed{numbers, table.data(), 4, 8, {out.data(), 8}}, host, 2); });
        const proa::KvPages pages{cache.data(), cache.data(), 8, 8, 2, 2, 1, 8, 8};
        is_refused([&] { run_once(proa::WriteKv{{table.data(), 8}, {table.data(), 8}, numbers, pages}, host, 2); });
    }
    CHECK(std::count(out.begin(), out.end(), kUntouched) == 32);
    CHECK(std::count(cache.begin(), cache.end(), kUntouched) == 64);
}

void wrong_shapes_are_refused() {
    uint16_t x[64] = {};
    float angles[8] = {};
    is_refused([&] { check(proa::Add{{x, 7}, {x, 8}, 8}); });
    is_refused([&] { check(proa::Add{{nullptr, 8}, {x, 8}, 8}); });
    is_refused([&] { check(proa::RmsNorm{{x, 8}, x, 2, 8, 1e-6f, {x, 16}}); });
    is_refused([&] { check(proa::RmsNorm{{x, 16}, nullptr, 2, 8, 1e-6f, {x, 16}}); });
    is_refused([&] { check(proa::Rotary{{x, 16}, angles, angles, 2, 8, 5, false}); });
    is_refused([&] { check(proa::KvPages{x, x, 13, 13, 1, 1, 1, 13, 13}); });
    is_refused([&] { check(proa::KvPages{x, x, 8, 8, 0, 1, 1, 8, 8}); });
    check(proa::RmsNorm{{x, 16}, x, 2, 8, 1e-6f, {x, 16}});
}

// The result of routing, as bits that can be compared over pools.
struct Routed {
    std::vector<int32_t> ids;
    std::vector<float> weights;

    Routed(proa::Host& host, const void* logits, bool wide, int rows, const proa::RouterRule& rule)
        : ids(size_t(rows * rule.top_k), -7), weights(ids.size()) {
        run_once(proa::Route{logits, rule.experts, wide, rule, ids.data(), weights.data()}, host, rows);
    }
    explicit Routed(const std::vector<uint16_t>& bits) : ids(bits.size() / 4), weights(ids.size()) {
        std::memcpy(ids.data(), bits.data(), ids.size() * 4);
        std::memcpy(weights.data(), bits.data() + ids.size() * 2, ids.size() * 4);
    }
    std::vector<uint16_t> bits() const {
        std::vector<uint16_t> out(ids.size() * 4);
        std::memcpy(out.data(), ids.data(), ids.size() * 4);
        std::memcpy(out.data() + ids.size() * 2, weights.data(), ids.size() * 4);
        return out;
    }
};

// Scores of a row in float64.
std::vector<double> scores_of(const float* x, const proa::RouterRule& rule) {
    std::vector<double> scores(static_cast<size_t>(rule.experts));
    const double most = *std::max_element(x, x + rule.experts);
    double total = 0;
    for (int e = 0; e < rule.experts; ++e) total += std::exp(x[e] - most);
    for (int e = 0; e < rule.experts; ++e)
        scores[size_t(e)] =
            rule.score == PROA_SCORE_SIGMOID ? 1 / (1 + std::exp(-double(x[e]))) : std::exp(x[e] - most) / total;
    return scores;
}

// The experts that may be chosen: those of the groups with the largest sums of their best.
std::vector<bool> kept_of(const std::vector<double>& keys, const proa::RouterRule& rule) {
    const int size = rule.experts / rule.groups;
    std::vector<std::pair<double, int>> merits;
    for (int g = 0; g < rule.groups; ++g) {
        std::vector<double> group(keys.begin() + g * size, keys.begin() + (g + 1) * size);
        std::sort(group.rbegin(), group.rend());
        merits.push_back({-std::accumulate(group.begin(), group.begin() + rule.best_of, 0.0), g});
    }
    std::sort(merits.begin(), merits.end());
    std::vector<bool> kept(keys.size(), false);
    for (int g = 0; g < rule.kept; ++g) std::fill_n(kept.begin() + merits[size_t(g)].second * size, size, true);
    return kept;
}

// Checks ids against float64, up to keys that are equal within rounding, and the weights of the ids.
void route_is_right(int rows, const proa::RouterRule& rule, bool wide, Random& random) {
    const size_t count = size_t(rows) * size_t(rule.experts);
    std::vector<float> logits = random.floats(count, 2);
    std::vector<uint16_t> narrow(count);  // with many ties
    for (size_t i = 0; i < count; ++i) {
        narrow[i] = rounded(logits[i]);
        if (!wide) logits[i] = value(narrow[i]);
    }
    const auto compute = [&](proa::Host& host) {
        const void* data = wide ? static_cast<const void*>(logits.data()) : narrow.data();
        return Routed(host, data, wide, rows, rule).bits();
    };
    on_everything(compute, [&](const std::vector<uint16_t>& bits) {
        const Routed got(bits);
        for (int row = 0; row < rows; ++row) {
            const float* x = logits.data() + row * rule.experts;
            const std::vector<double> scores = scores_of(x, rule);
            std::vector<double> keys = scores;
            for (int e = 0; rule.correction && e < rule.experts; ++e) keys[size_t(e)] += double(rule.correction[e]);
            const std::vector<bool> kept = kept_of(keys, rule);
            std::vector<int> order(static_cast<size_t>(rule.experts));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
                return kept[size_t(a)] != kept[size_t(b)] ? kept[size_t(a)] : keys[size_t(a)] > keys[size_t(b)];
            });
            double chosen = 0, span = 0;
            for (int e = 0; e < rule.experts; ++e) span = std::max(span, 2 * std::abs(double(x[e])));
            const double off = (rule.experts + rule.top_k + 20 + 2 * span) * kEps32;  // of a score
            for (int k = 0; k < rule.top_k; ++k) chosen += scores[size_t(got.ids[size_t(row * rule.top_k + k)])];
            for (int k = 0; k < rule.top_k; ++k) {
                const size_t at = size_t(row * rule.top_k + k);
                const size_t e = size_t(got.ids[at]), best = size_t(order[size_t(k)]);
                const double apart = std::abs(keys[e] - keys[best]), room = 2 * off + 2 * kEps32 * std::abs(keys[e]);
                CHECK(e == best || (apart > 0 && apart <= room && kept[e]));
                const double divisor =
                    rule.renormalise ? std::max(chosen + double(rule.epsilon), double(rule.least)) : 1;
                const double want = scores[e] / divisor * double(rule.scale);
                CHECK(within(got.weights[at], want, want * off));
            }
        }
    });
}

void all_rules_are_right(Random& random) {
    const std::vector<float> bias = random.floats(512, 0.3f);
    for (const bool wide : {false, true})
        for (const bool renormalise : {false, true}) {
            for (const auto& [rows, experts, top_k] :
                 {std::array{1, 8, 1}, {9, 13, 4}, {3, 512, 10}, {400, 128, 8}, {2, 16, 16}})
                for (const float* correction : {static_cast<const float*>(nullptr), bias.data()})
                    for (const bool sigmoids : {false, true})
                        route_is_right(rows,
                                       {experts, top_k, sigmoids, renormalise, 1, 1, 1, 2.5f, 1e-20f, 0, correction},
                                       wide, random);
            route_is_right(9, {160, 6, false, renormalise, 8, 3, 1, 16, 0, 0, nullptr}, wide, random);
            route_is_right(9, {256, 8, true, renormalise, 8, 4, 2, 2.5f, 1e-20f, 0, bias.data()}, wide, random);
            route_is_right(5, {12, 5, true, renormalise, 4, 2, 2, 1, 0.5f, 4, bias.data()}, wide, random);
        }
}

void of_equal_groups_the_first_are_kept() {
    const std::vector<float> logits(12, 0.5f);
    on_everything([&](proa::Host& host) {
        const Routed got(host, logits.data(), true, 1, {12, 4, true, true, 4, 2, 2, 1, 0, 0, nullptr});
        CHECK((got.ids == std::vector<int32_t>{0, 1, 2, 3}));
        return got.bits();
    });
}

void strange_logits_crash_nothing() {
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    const std::vector<std::vector<float>> strange = {{nan, nan, nan, nan, nan, nan},
                                                     {1, nan, 2, -infinity, nan, 0},
                                                     {infinity, infinity, 0, nan, 1, 0},
                                                     {-infinity, -infinity, -infinity, -infinity, -infinity, 0}};
    const float correction[6] = {0, 0, 0, 0, 0, nan};
    for (const std::vector<float>& logits : strange)
        for (const int groups : {1, 3})
            for (const bool sigmoids : {false, true})
                on_everything([&](proa::Host& host) {
                    const float* of_last = logits[5] == 0 && logits[0] == -infinity ? correction : nullptr;
                    const proa::RouterRule rule{6, 4, sigmoids, true, groups, groups - groups / 3, 1, 1, 0, 0, of_last};
                    const Routed got(host, logits.data(), true, 1, rule);
                    std::vector<int32_t> ids = got.ids;
                    std::sort(ids.begin(), ids.end());
                    CHECK(std::unique(ids.begin(), ids.end()) == ids.end() && ids[0] >= 0 && ids[3] < 6);
                    for (float weight : got.weights) CHECK(std::isnan(weight));  // as in the reference
                    return std::vector<uint16_t>(got.ids.begin(), got.ids.end());
                });
}

void infinite_logits_have_sigmoids() {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> logits = {-infinity, infinity, 0};
    on_everything([&](proa::Host& host) {
        const Routed got(host, logits.data(), true, 1, {3, 3, true, false, 1, 1, 1, 1, 0, 0, nullptr});
        CHECK((got.ids == std::vector<int32_t>{1, 2, 0}));
        CHECK(got.weights[0] == 1 && got.weights[1] == 0.5f && got.weights[2] < 1e-37f);
        return got.bits();
    });
}

void wrong_rules_are_refused() {
    float logits[16] = {}, weights[16];
    int32_t ids[16];
    const auto refused = [&](const proa::RouterRule& rule) {
        is_refused([&] { check(proa::Route{logits, 16, true, rule, ids, weights}); });
    };
    for (const auto& [groups, kept, best_of] : {std::array{3, 2, 1}, {4, 5, 1}, {4, 1, 1}, {8, 4, 3}, {16, 8, 2}})
        refused({16, 6, true, true, groups, kept, best_of, 1, 0, 0, nullptr});
    refused({16, 17, true, true, 1, 1, 1, 1, 0, 0, nullptr});
    refused({16, 6, 2, true, 1, 1, 1, 1, 0, 0, nullptr});
    check(proa::Route{logits, 16, true, {16, 6, true, true, 4, 2, 2, 1, 0, 0, nullptr}, ids, weights});
}

// The argmax at any column; the lowest id among equals; -1 for rows with a non-finite value.
void argmax_is_right(int rows, int width, Random& random) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    const int stride = width + kGap;
    std::vector<float> logits(size_t(rows) * size_t(stride), infinity);
    std::vector<int32_t> want;
    for (int row = 0; row < rows; ++row) {
        float* x = logits.data() + row * stride;
        for (int i = 0; i < width; ++i)
            x[i] = random.normal() - (row % 2 ? 100 : 0);  // in some rows all are below zero
        const int best = random.below(width), equal = random.below(width);
        x[best] = x[equal] = 50;
        want.push_back(std::min(best, equal));
        if (row % 4 != 3) continue;
        x[random.below(width)] = row % 3 == 0 ? nan : row % 3 == 1 ? infinity : -infinity;
        want.back() = -1;
    }
    on_everything([&](proa::Host& host) {
        std::vector<int32_t> ids(size_t(rows), -7);
        run_once(proa::Argmax{logits.data(), stride, width, ids.data()}, host, rows);
        CHECK(ids == want);
        return std::vector<uint16_t>(ids.begin(), ids.end());
    });
}

}  // namespace

int main() {
    Random random(3);
    for (const Shape& shape : kShapes) {
        rms_norm_is_right(shape, random);
        add_is_exact(shape, random);
        gated_add_is_right(shape, random);
    }
    for (const bool interleaved : {false, true}) {
        rotary_is_right(1, 1, 2, 1, interleaved, random);
        rotary_is_right(5, 3, 80, 40, interleaved, random);
        rotary_is_right(5, 4, 16, 4, interleaved, random);
        rotary_is_right(300, 8, 128, 64, interleaved, random);
    }
    embed_copies_rows(random);
    numbers_out_of_range_are_refused();
    wrong_shapes_are_refused();
    all_rules_are_right(random);
    of_equal_groups_the_first_are_kept();
    infinite_logits_have_sigmoids();
    wrong_rules_are_refused();
    strange_logits_crash_nothing();
    for (const int width : {1, 15, 16, 1023, 1024, 1025, 49152})
        argmax_is_right(1, width, random), argmax_is_right(13, width, random);
}
