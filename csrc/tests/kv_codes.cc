// The e4m3 KV cache: every bfloat16 value becomes the nearest code, every code its value, for any count.

#include <algorithm>

#include "operations.h"
#include "rows.h"

using namespace testing;

namespace {

// The nearest code of a magnitude, ties to even; finite values saturate at 448.
uint8_t nearest(double size) {
    uint8_t best = 0;
    for (uint8_t code = 1; code < 127; ++code) {
        const double old_off = std::abs(size - double(e4m3(best))), off = std::abs(size - double(e4m3(code)));
        if (off < old_off || (off == old_off && code % 2 == 0)) best = code;
    }
    return best;
}

void all_values_become_the_nearest_code() {
    std::vector<uint16_t> all;
    for (int bits = 0; bits < 1 << 16; ++bits) all.push_back(uint16_t(bits));
    for (const float scale : {1.f, 0.25f, 3.f}) {
        std::vector<uint8_t> want;
        for (const uint16_t bits : all) {
            const float x = value(bits) * (1 / scale);
            const bool tiny = (bits & 0x7f80) == 0;  // workers flush subnormals to zero
            const uint8_t size = std::isfinite(x) ? nearest(tiny ? 0 : std::abs(double(x))) : 0x7f;
            want.push_back(uint8_t(size | (bits >> 8 & 0x80)));
        }
        on_everything([&](proa::Host& host) {
            constexpr int kWidth = 64;
            const int rows = int(all.size()) / kWidth;
            std::vector<uint8_t> keys(all.size()), values(all.size());
            std::vector<int64_t> slots;
            for (int i = 0; i < rows; ++i) slots.push_back(rows - 1 - i);
            const proa::WriteKv write{{all.data(), kWidth},
                                      {all.data(), kWidth},
                                      slots.data(),
                                      {keys.data(), values.data(), kWidth, kWidth, rows, 1, 1, kWidth, kWidth,
                                       proa::KvType::kE4m3, scale, scale}};
            check(write);
            run_once(write, host, rows);
            CHECK(keys == values);
            for (int i = 0; i < rows; ++i)
                CHECK(std::equal(want.begin() + i * kWidth, want.begin() + (i + 1) * kWidth,
                                 keys.begin() + (rows - 1 - i) * kWidth));
            return std::vector<uint16_t>();
        });
    }
}

void all_codes_come_back() {
    on_everything([&](proa::Host& host) {
        std::vector<uint8_t> codes(256);
        for (int i = 0; i < 256; ++i) codes[size_t(i)] = uint8_t(i);
        for (const int count : {256, 8, 33, 40, 1}) {
            std::vector<uint16_t> out(size_t(count) + 1, 0x1234);
            host.kernels->from_e4m3(codes.data(), count, out.data());
            for (int i = 0; i < count; ++i) {
                const float got = value(out[size_t(i)]), want = e4m3(codes[size_t(i)]);
                CHECK(std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want));
            }
            CHECK(out[size_t(count)] == 0x1234);
        }
        return std::vector<uint16_t>();
    });
}

void wrong_scales_are_refused() {
    uint16_t x[8];
    for (const float scale : {0.f, -1.f, INFINITY, NAN}) {
        for (const bool of_key : {true, false}) {
            try {
                check(proa::KvPages{x, x, 8, 8, 1, 1, 1, 8, 8, proa::KvType::kE4m3, of_key ? scale : 1,
                                    of_key ? 1 : scale});
                CHECK(false);
            } catch (const proa::Error& error) {
                CHECK(error.code() == PROA_ERROR_ARGUMENT);
            }
        }
    }
}

}  // namespace

int main() {
    all_values_become_the_nearest_code();
    all_codes_come_back();
    wrong_scales_are_refused();
}
