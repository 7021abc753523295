// Experts of every format on every instruction set, in memory of exactly the required size. Values are compared with
// float64 in tests/ops/test_native_weights.py; here the instruction sets must agree, and no kernel may read beyond the
// end.

#include <cstdlib>
#include <map>
#include <memory>

#include "moe.h"
#include "operations.h"
#include "pack.h"
#include "row_tasks.h"

using namespace testing;

namespace {

constexpr int kExperts = 3, kHidden = 96, kWidth = 40, kTopK = 2;

int group_of(proa::Format format) {
    switch (format) {
        case proa::Format::kBf16:
        case proa::Format::kFp16:
        case proa::Format::kFp8Row:
        case proa::Format::kInt8F32: return 0;
        case proa::Format::kNvfp4:
        case proa::Format::kQ6K: return 16;
        default: return 32;
    }
}

struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory exactly(size_t bytes) { return Memory(static_cast<uint8_t*>(std::aligned_alloc(proa::kLineBytes, bytes))); }

// Fills scales, and block scales, with values near 0.01 in the format's type.
void fill_scales(proa::Format format, std::vector<uint8_t>& scales) {
    const float wide = 0.01f;
    for (size_t i = 0; i < scales.size(); ++i) {
        switch (format) {
            case proa::Format::kFp8Row:
            case proa::Format::kFp8Panel:
            case proa::Format::kInt8F32:
            case proa::Format::kInt4F32:
            case proa::Format::kUint4F32: scales[i] = reinterpret_cast<const uint8_t*>(&wide)[i % 4]; break;
            case proa::Format::kInt4Bf16:
            case proa::Format::kUint4Bf16: scales[i] = i % 2 ? 0x3c : 0x24; break;
            case proa::Format::kMxfp8:
            case proa::Format::kMxfp4: scales[i] = 120; break;
            case proa::Format::kNvfp4: scales[i] = 0x20; break;
            case proa::Format::kQ4K:
            case proa::Format::kQ5K:
            case proa::Format::kQ6K: scales[i] = uint8_t(i % 32); break;
            default: scales[i] = i % 2 ? 0x21 : 0x1f;  // float16
        }
    }
}

uint8_t random_code(proa::Format format, Random& random) {
    const int bits = proa::facts_of(format).code_bits;
    uint8_t code = uint8_t(random.below(1 << (bits > 8 ? 8 : bits)));
    const bool e4m3 =
        format == proa::Format::kFp8Row || format == proa::Format::kFp8Panel || format == proa::Format::kMxfp8;
    if (e4m3 && (code & 0x7f) > 0x50) code &= 0x4f;
    return code;
}

void pack_random(const proa::Layout& l, int rows, int step, uint8_t* out, Random& random) {
    const bool wide = proa::facts_of(l.format).code_bits == 16;
    const size_t columns = size_t(l.columns), groups = size_t(l.groups) * 4;
    std::vector<uint8_t> codes(size_t(rows) * columns * (wide ? 2 : 1)), scales(size_t(rows) * groups), blocks;
    for (size_t i = 0; i < codes.size(); ++i)
        codes[i] = wide ? (i % 2 ? uint8_t(0x20 + random.below(16)) : uint8_t(random.below(256)))
                        : random_code(l.format, random);
    fill_scales(l.format, scales);
    blocks.resize(size_t(rows) * groups);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i % 2 ? 0x14 : 0;
    proa::pack_rows(
        l,
        {codes.data(), columns * (wide ? 2 : 1), scales.data(), groups, l.format == proa::Format::kFp8Panel ? 16 : 1,
         scales.data(), blocks.data(), blocks.data(), groups, 0.01f},
        rows, step, out);
}

proa::Matrix stack(const proa::Layout& l, Memory& memory) {
    const size_t one = size_t(l.panels) * l.panel_bytes;
    memory = exactly(one * kExperts);
    return {l, kExperts, {{0, l.panels, memory.get(), one}}};
}

// Splits a matrix over the pool's nodes.
proa::Matrix spread_over(const proa::Matrix& m, int nodes) {
    proa::Matrix out{m.layout, m.count, {}};
    for (int n = 0; n < nodes; ++n) {
        const int first = m.layout.panels / 2 * n / nodes * 2,
                  end = n + 1 < nodes ? m.layout.panels / 2 * (n + 1) / nodes * 2 : m.layout.panels;
        out.slices.push_back({first, end, m.slices[0].data + size_t(first) * m.layout.panel_bytes, m.slices[0].stride});
    }
    return out;
}

void experts_agree(proa::Format format, int tokens) {
    Random random(unsigned(format) * 100 + unsigned(tokens));
    const int group = group_of(format), panels = (kWidth + 15) / 16;
    const proa::Layout half = proa::layout_of(format, kWidth, kHidden, group);
    Memory up_memory, down_memory;
    const proa::Matrix up = stack(proa::layout_of(format, panels * 32, kHidden, group), up_memory);
    const proa::Matrix down = stack(proa::layout_of(format, kHidden, kWidth, group), down_memory);
    for (int e = 0; e < kExperts; ++e) {
        uint8_t* at = up_memory.get() + size_t(e) * up.slices[0].stride;
        pack_random(half, kWidth, 2, at, random);
        pack_random(half, kWidth, 2, at + half.panel_bytes, random);
        pack_random(down.layout, kHidden, 1, down_memory.get() + size_t(e) * down.slices[0].stride, random);
    }
    const std::vector<uint16_t> x = random.rows(size_t(tokens) * kHidden);
    std::vector<int32_t> ids;
    for (int t = 0; t < tokens; ++t) ids.push_back(t % kExperts), ids.push_back((t + 1 + t / 7 % 2) % kExperts);
    const std::vector<float> weights(ids.size(), 0.5f);
    std::vector<uint16_t> scalar;
    const auto compute = [&](proa::Host& host) {
        const proa::Matrix my_up = spread_over(up, host.pool.nodes()), my_down = spread_over(down, host.pool.nodes());
        const proa::Experts experts{&my_up, &my_down, proa::Activation::kSilu, 0, nullptr, nullptr};
        std::vector<uint16_t> y(size_t(tokens) * kHidden);
        const proa::Moe op{&experts, kTopK, ids.data(), weights.data(), x.data(), kHidden, y.data(), kHidden, false};
        run_once(op, host, tokens);
        return y;
    };
    on_everything(compute, [&](const std::vector<uint16_t>& y) {
        double largest = 0;
        if (scalar.empty()) scalar = y;
        for (uint16_t v : scalar) largest = std::max(largest, std::abs(double(value(v))));
        CHECK(largest > 0);
        for (size_t i = 0; i < y.size(); ++i) CHECK(within(value(y[i]), value(scalar[i]), 4 * kRound16 * largest));
    });
}

// Tasks are whole units, and multiples of four panels if they have at least four, so that panels always share
// activations.
void tasks_have_whole_tiles() {
    for (int unit : {1, 2})
        for (size_t streamed : {size_t(1) << 10, size_t(18) << 10, size_t(60) << 10, size_t(300) << 10})
            for (size_t total : {size_t(1) << 18, size_t(1) << 24, size_t(1) << 30}) {
                const int panels = proa::panels_to_stream(unit, streamed, total, 14);
                CHECK(panels >= unit && panels % unit == 0);
                CHECK(panels < proa::kPanelsAtOnce || panels % proa::kPanelsAtOnce == 0);
                CHECK(panels == unit || size_t(panels - 1) * streamed <= proa::kMostTaskBytes);
            }
    CHECK(proa::panels_to_stream(2, 18 << 10, size_t(96) * 8 * (18 << 10), 14) == 4);
}

}  // namespace

int main() {
    tasks_have_whole_tiles();
    for (int format = 0; format < proa::kFormats; ++format)
        for (int tokens : {1, 5, 70}) experts_agree(proa::Format(format), tokens);
    return 0;
}
