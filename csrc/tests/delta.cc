// The gated delta rule against float64: steps of any length, any pool, other slots unchanged.

#include "delta.h"

#include <algorithm>

#include "operations.h"

using namespace testing;

namespace {

// Rows per sequence in consecutive steps; a sequence with 0 rows is not in that step.
struct Case {
    proa::DeltaShape shape;
    std::vector<std::vector<int32_t>> steps;
};

const Case kCases[] = {
    {{1, 1, 8, 16, 2}, {{1}, {1}, {3}}},
    {{2, 3, 16, 32, 4}, {{5, 1}, {1, 1}, {1, 2}, {40, 3}}},
    {{2, 1, 40, 80, 4}, {{2, 0, 9}, {0, 1, 1}, {1, 1, 70}}},
    {{4, 2, 128, 128, 4}, {{3, 20}, {1, 1}}},
};
constexpr int kSlots = 5;
constexpr float kEps = 1e-6f;
constexpr int kGap = 8;  // elements between rows of the output, which must not be written
constexpr uint16_t kUntouched = 0x1234;

struct Weights {
    std::vector<float> conv, a_log, dt_bias;  // conv: [taps][channels]
    std::vector<uint16_t> norm;

    Weights(const proa::DeltaShape& s, Random& random)
        : conv(random.floats(size_t(s.taps) * size_t(s.channels()))),
          a_log(random.floats(size_t(s.heads()))),
          dt_bias(random.floats(size_t(s.heads()))),
          norm(random.rows(size_t(s.value_dim))) {}
};

// Projections of a sequence from its first row on: [rows][groups][q, k, v, z] and [rows][groups][b, a].
struct Text {
    std::vector<uint16_t> projected, gates;
    std::vector<double> want, bound;  // [rows][heads][value_dim]
};

int group_width(const proa::DeltaShape& s) { return 2 * (s.key_dim + s.values()); }

double silu(double x) { return x / (1 + std::exp(-x)); }

// One channel's convolution at a row, and the error of float32.
double convolved(const proa::DeltaShape& s, const Text& text, const Weights& w, int row, int offset, int channel,
                 double* error) {
    double sum = 0, size = 0;
    for (int t = 0; t < s.taps; ++t) {
        const int from = row - s.taps + 1 + t;
        if (from < 0) continue;
        const double product = double(w.conv[size_t(t) * size_t(s.channels()) + size_t(channel)]) *
                               value(text.projected[size_t(from * s.groups * group_width(s) + offset)]);
        sum += product, size += std::abs(product);
    }
    *error += std::pow(1.1 * size * (s.taps + 1) * kEps32 + std::abs(silu(sum)) * 12 * kEps32, 2);
    return silu(sum);
}

// The error bound that tests/delta_cases.py derives: a step never enlarges a state, so errors only add up.
void solve_head(const proa::DeltaShape& s, const Weights& w, int rows, int head, Text& text) {
    const int group = head / s.per_group, member = head % s.per_group, base = group * group_width(s);
    const size_t keys = size_t(s.key_dim), values = size_t(s.value_dim);
    std::vector<double> state(keys * values), q(keys), k(keys), v(values), seen(values);
    double off = 0;
    for (int row = 0; row < rows; ++row) {
        double dq = 0, dk = 0, dv = 0, of_q = 0, of_k = 0, of_v = 0;
        for (int i = 0; i < s.key_dim; ++i) {
            const int channel = group * s.key_dim + i;
            q[size_t(i)] = convolved(s, text, w, row, base + i, channel, &dq);
            k[size_t(i)] = convolved(s, text, w, row, base + s.key_dim + i, s.groups * s.key_dim + channel, &dk);
            of_q += std::pow(q[size_t(i)], 2), of_k += std::pow(k[size_t(i)], 2);
        }
        for (int i = 0; i < s.value_dim; ++i) {
            const int offset = base + 2 * s.key_dim + member * s.value_dim + i;
            v[size_t(i)] = convolved(s, text, w, row, offset, 2 * s.groups * s.key_dim + head * s.value_dim + i, &dv);
            of_v += std::pow(v[size_t(i)], 2);
        }
        const double q_length = std::sqrt(of_q + 1e-6), k_length = std::sqrt(of_k + 1e-6);
        const double rounding = (s.key_dim / 2. + 8) * kEps32, shorter = 1 / std::sqrt(double(s.key_dim));
        for (int i = 0; i < s.key_dim; ++i) q[size_t(i)] *= shorter / q_length, k[size_t(i)] /= k_length;
        dq = (2 * std::sqrt(dq) / q_length + rounding + 2 * kEps32) * shorter;
        dk = 2 * std::sqrt(dk) / k_length + rounding;
        const size_t gate = size_t((row * s.groups + group) * 2 * s.per_group + member);
        const double b = value(text.gates[gate]), a = value(text.gates[gate + size_t(s.per_group)]);
        const double beta = 1 / (1 + std::exp(-b)), speed = std::exp(double(w.a_log[size_t(head)]));
        const double rate = speed * std::log1p(std::exp(a + w.dt_bias[size_t(head)])), decay = std::exp(-rate);
        const double d_decay = decay * (rate * 16 * kEps32 + speed * 4 * kEps32 * (1 + std::abs(a)) + 4 * kEps32);
        double size = 0;
        for (double& x : state) size += x * x, x *= decay;
        off += (std::sqrt(size) + std::sqrt(of_v)) * (d_decay + 4 * dk + (s.key_dim + 16) * kEps32) + std::sqrt(dv);
        double length = 0, squares = 0;
        for (size_t c = 0; c < values; ++c) {
            double known = 0;
            for (size_t i = 0; i < keys; ++i) known += state[i * values + c] * k[i];
            seen[c] = 0;
            for (size_t i = 0; i < keys; ++i) {
                double& x = state[i * values + c];
                x += k[i] * beta * (v[c] - known);
                seen[c] += x * q[i], length += x * x;
            }
            squares += seen[c] * seen[c];
        }
        length = std::sqrt(length);
        const double error = (off + length * s.key_dim * kEps32) * shorter + length * dq;
        const double root = std::sqrt(squares / s.value_dim + kEps);
        for (size_t c = 0; c < values; ++c) {
            const double z = value(text.projected[size_t(row * s.groups * group_width(s) + base + 2 * s.key_dim +
                                                         s.values() + member * s.value_dim) +
                                                  c]);
            const double factor = value(w.norm[c]) * silu(z), want = seen[c] / root * factor;
            const size_t at = size_t(row * s.heads() + head) * values + c;
            text.want[at] = want;
            text.bound[at] =
                error / root * (1 + std::abs(seen[c] / root) / std::sqrt(double(s.value_dim))) * std::abs(factor) +
                std::abs(want) * (s.value_dim / 2. + 24) * kEps32 + stored(want);
        }
    }
}

std::vector<Text> texts_of(const Case& c, const Weights& w, Random& random) {
    const proa::DeltaShape& s = c.shape;
    std::vector<Text> texts(c.steps[0].size());
    for (size_t i = 0; i < texts.size(); ++i) {
        int rows = 0;
        for (const auto& step : c.steps) rows += step[i];
        Text& text = texts[i];
        text.projected = random.rows(size_t(rows * s.groups * group_width(s)));
        text.gates = random.rows(size_t(rows * s.groups * 2 * s.per_group), 2);
        text.want.resize(size_t(rows * s.heads() * s.value_dim)), text.bound.resize(text.want.size());
        for (int head = 0; head < s.heads(); ++head) solve_head(s, w, rows, head, text);
    }
    return texts;
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from, int first, int rows, int width) {
    to.insert(to.end(), from.begin() + int64_t(first) * width, from.begin() + int64_t(first + rows) * width);
}

// The states that sequences keep between steps, and their inputs.
struct Service {
    const proa::DeltaShape& shape;
    const Weights& weights;
    const std::vector<Text>& texts;
    std::vector<float> rule;
    std::vector<uint16_t> tail;
    std::vector<int32_t> done;

    Service(const proa::DeltaShape& s, const Weights& w, const std::vector<Text>& all)
        : shape(s),
          weights(w),
          texts(all),
          rule(size_t(kSlots) * state_values(), NAN),
          tail(size_t(kSlots) * size_t(s.taps - 1) * size_t(s.channels()), 0x7fc0),
          done(all.size(), 0) {}

    size_t state_values() const { return size_t(shape.heads()) * size_t(shape.key_dim) * size_t(shape.value_dim); }

    // Runs one step with counts[i] rows of sequence i, and returns its checked output.
    std::vector<uint16_t> step(const std::vector<int32_t>& counts, proa::Host& host) {
        const proa::DeltaShape& s = shape;
        const int width = s.groups * group_width(s), gates = s.groups * 2 * s.per_group;
        const int out_stride = s.heads() * s.value_dim + kGap;
        std::vector<uint16_t> projected, beside;
        std::vector<int32_t> q_lens, kv_lens, slots, table(counts.size(), 0);
        std::vector<std::pair<int, int>> rows;  // sequence, its row
        for (int i = 0; i < int(counts.size()); ++i) {
            const int n = counts[size_t(i)], first = done[size_t(i)];
            if (n == 0) continue;
            append(projected, texts[size_t(i)].projected, first, n, width);
            append(beside, texts[size_t(i)].gates, first, n, gates);
            for (int r = 0; r < n; ++r) rows.emplace_back(i, first + r);
            done[size_t(i)] += n;
            q_lens.push_back(n), kv_lens.push_back(done[size_t(i)]), slots.push_back(kSlots - 1 - i);
        }
        proa::AttentionBatch batch(int(counts.size()) + 1, 1);
        batch.set(int(q_lens.size()), q_lens.data(), kv_lens.data(), table.data(), 1, 1, 1 << 20, slots.data());
        std::vector<float> mixed(rows.size() * size_t(s.channels()), NAN);
        std::vector<uint16_t> out(rows.size() * size_t(out_stride), kUntouched);
        const auto part = [&](int offset) { return proa::ConstRows{projected.data() + offset, width}; };
        const Weights& w = weights;
        const int k = s.key_dim, v = 2 * s.key_dim, z = v + s.values(), apart = group_width(s);
        const proa::ConstRows b{beside.data(), gates}, a{beside.data() + s.per_group, gates};
        const proa::GatedDelta op{s,
                                  part(0),
                                  part(k),
                                  part(v),
                                  part(z),
                                  apart,
                                  b,
                                  a,
                                  2 * s.per_group,
                                  w.conv.data(),
                                  w.a_log.data(),
                                  w.dt_bias.data(),
                                  w.norm.data(),
                                  kEps,
                                  rule.data(),
                                  tail.data(),
                                  kSlots,
                                  &batch,
                                  mixed.data(),
                                  {out.data(), out_stride}};
        check(op);
        run_once(op, host, int(rows.size()));
        compare(rows, out);
        return out;
    }

    void compare(const std::vector<std::pair<int, int>>& rows, const std::vector<uint16_t>& out) const {
        const int width = shape.heads() * shape.value_dim;
        for (size_t i = 0; i < out.size(); ++i) {
            const auto [sequence, row] = rows[i / size_t(width + kGap)];
            const int column = int(i % size_t(width + kGap));
            const Text& text = texts[size_t(sequence)];
            const size_t at = size_t(row * width + column);
            CHECK(column < width ? within(value(out[i]), text.want[at], text.bound[at]) : out[i] == kUntouched);
        }
    }
};

void rule_is_right(const Case& c, Random& random) {
    const Weights w(c.shape, random);
    const std::vector<Text> texts = texts_of(c, w, random);
    on_everything([&](proa::Host& host) {
        Service service(c.shape, w, texts);
        std::vector<uint16_t> all;
        for (const auto& counts : c.steps) {
            const std::vector<uint16_t> out = service.step(counts, host);
            all.insert(all.end(), out.begin(), out.end());
        }
        for (size_t i = 0; i < (kSlots - texts.size()) * service.state_values(); ++i)
            CHECK(std::isnan(service.rule[i]));
        all.insert(all.end(), service.tail.begin(), service.tail.end());
        return all;
    });
}

void what_cannot_be_is_refused() {
    std::vector<float> floats(1024);
    std::vector<uint16_t> values(1024);
    proa::AttentionBatch batch(1, 1);
    const auto make = [&](proa::DeltaShape shape) {
        const proa::ConstRows rows{values.data(), 512};
        return proa::GatedDelta{shape,
                                rows,
                                rows,
                                rows,
                                rows,
                                64,
                                rows,
                                rows,
                                2,
                                floats.data(),
                                floats.data(),
                                floats.data(),
                                values.data(),
                                kEps,
                                floats.data(),
                                values.data(),
                                1,
                                &batch,
                                floats.data(),
                                {values.data(), 512}};
    };
    const auto refused = [](const proa::GatedDelta& op) {
        try {
            check(op);
        } catch (const proa::Error& error) {
            return error.code() == PROA_ERROR_ARGUMENT;
        }
        return false;
    };
    CHECK(!refused(make({1, 1, 8, 16, 2})));
    for (const proa::DeltaShape shape :
         {proa::DeltaShape{1, 1, 8, 24, 2}, proa::DeltaShape{1, 1, 8, 16, 1}, proa::DeltaShape{1, 1, 8, 16, 9},
          proa::DeltaShape{0, 1, 8, 16, 2}, proa::DeltaShape{1, 8, 8, 16, 2}})
        CHECK(refused(make(shape)));
}

}  // namespace

int main() {
    Random random(7);
    for (const Case& c : kCases) rule_is_right(c, random);
    what_cannot_be_is_refused();
}
