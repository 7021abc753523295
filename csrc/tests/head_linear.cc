// Linear layers per head against float64: few and many tokens, strided heads, carried elements, any pool.

#include "head_linear.h"

#include "operations.h"

using namespace testing;

namespace {

struct Case {
    int tokens, heads, inputs, outputs, carried;
};

const Case kCases[] = {
    {1, 3, 24, 32, 8}, {4, 2, 128, 512, 64}, {17, 2, 512, 128, 0}, {70, 5, 40, 72, 16}, {300, 1, 32, 16, 3},
};

// Matrices [heads][outputs][inputs], packed, with their panels split over `nodes` nodes.
struct Weights {
    std::vector<uint16_t> values;
    std::vector<std::vector<uint8_t>> memory;
    proa::Matrix matrix;

    Weights(const Case& c, int nodes, const std::vector<uint16_t>& from) : values(from) {
        const proa::Layout l = proa::layout_of(proa::Format::kBf16, c.outputs, c.inputs, 0);
        std::vector<int32_t> first;
        std::vector<const void*> data;
        std::vector<int64_t> strides, bytes;
        for (int n = 0; n < nodes; ++n) first.push_back(l.panels * n / nodes);
        for (int n = 0; n < nodes; ++n) {
            const int end = n + 1 < nodes ? first[size_t(n) + 1] : l.panels;
            const size_t stride = size_t(end - first[size_t(n)]) * l.panel_bytes;
            memory.emplace_back(stride * size_t(c.heads) + 64);
            uint8_t* at = memory.back().data();
            at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64;
            data.push_back(at), strides.push_back(int64_t(stride)), bytes.push_back(int64_t(stride) * c.heads);
            for (int h = 0; h < c.heads; ++h)
                for (int row = first[size_t(n)] * 16; row < std::min(end * 16, c.outputs); ++row)
                    for (int i = 0; i < c.inputs; ++i) {
                        const size_t panel = size_t(row / 16 - first[size_t(n)]) * l.panel_bytes;
                        uint8_t* to = at + size_t(h) * stride + panel + size_t(i / 2) * 64 + size_t(row % 16) * 4;
                        std::memcpy(to + size_t(i % 2) * 2, &values[size_t((h * c.outputs + row) * c.inputs + i)], 2);
                    }
        }
        matrix = proa::checked_matrix(l, c.heads, nodes, first.data(), data.data(), strides.data(), bytes.data());
    }
};

void check_all(const Case& c, const std::vector<uint16_t>& weights, const std::vector<uint16_t>& x, int x_apart,
               const std::vector<uint16_t>& y, int y_apart) {
    for (int t = 0; t < c.tokens; ++t)
        for (int h = 0; h < c.heads; ++h) {
            const uint16_t* from = &x[size_t((t * c.heads + h) * x_apart)];
            const uint16_t* to = &y[size_t((t * c.heads + h) * y_apart)];
            for (int row = 0; row < c.outputs; ++row) {
                double want = 0, size = 0;
                for (int i = 0; i < c.inputs; ++i) {
                    const double product =
                        double(value(from[i])) * double(value(weights[size_t((h * c.outputs + row) * c.inputs + i)]));
                    want += product, size += std::abs(product);
                }
                CHECK(within(value(to[row]), want, size * (c.inputs + 8) * kEps32 + stored(want)));
            }
            for (int i = 0; i < c.carried; ++i) CHECK(to[c.outputs + i] == from[c.inputs + i]);
            for (int i = c.outputs + c.carried; i < y_apart; ++i) CHECK(to[i] == 0x7fc0);  // not written
        }
}

void maps_are_right() {
    for (const Case& c : kCases) {
        Random random(unsigned(c.tokens));
        const int x_apart = c.inputs + c.carried + 5, y_apart = c.outputs + c.carried + 2;
        const auto weights = random.rows(size_t(c.heads) * size_t(c.outputs) * size_t(c.inputs));
        const auto x = random.rows(size_t(c.tokens) * size_t(c.heads) * size_t(x_apart));
        const auto compute = [&](proa::Host& host) {
            const Weights packed(c, host.pool.nodes(), weights);
            std::vector<uint16_t> y(size_t(c.tokens) * size_t(c.heads) * size_t(y_apart), 0x7fc0);
            const proa::HeadLinear op{&packed.matrix,
                                      c.carried,
                                      x.data(),
                                      int64_t(c.heads) * x_apart,
                                      x_apart,
                                      y.data(),
                                      int64_t(c.heads) * y_apart,
                                      y_apart};
            check(op);
            run_once(op, host, c.tokens);
            return y;
        };
        on_everything(compute, [&](const std::vector<uint16_t>& y) { check_all(c, weights, x, x_apart, y, y_apart); });
    }
}

bool refused(const proa::HeadLinear& op) {
    try {
        check(op);
    } catch (const proa::Error& error) {
        return error.code() == PROA_ERROR_ARGUMENT;
    }
    return false;
}

void what_cannot_be_is_refused() {
    const Case c{1, 2, 32, 16, 8};
    const Weights packed(c, 1, std::vector<uint16_t>(2 * 16 * 32));
    std::vector<uint16_t> x(200), y(200);
    const proa::HeadLinear good{&packed.matrix, 8, x.data(), 80, 40, y.data(), 48, 24};
    CHECK(!refused(good));
    for (int wrong = 0; wrong < 4; ++wrong) {
        proa::HeadLinear op = good;
        if (wrong == 0) op.x_apart = 39;
        if (wrong == 1) op.y_apart = 23;
        if (wrong == 2) op.x_stride = 79;
        if (wrong == 3) op.carried = -1;
        CHECK(refused(op));
    }
}

}  // namespace

int main() {
    maps_are_right();
    what_cannot_be_is_refused();
}
