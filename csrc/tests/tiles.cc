// White-box tests of the loops over emulated matrix tiles: properties that results do not show.

#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "isa/kernels.h"

namespace proa {

constexpr int kWideFromTokens = 16, kMostPlain = 4, kMostScaled = 4;
constexpr int tiles_from_tokens(Format) { return 5; }
constexpr int digit_rows_at_once(int) { return 1; }
constexpr int rows_at_once(int, bool) { return 1; }

// clang-format off: the order of these matters
#include "kernels/vec_scalar.h"
#include "kernels/common.h"
#include "kernels/dot_f32.h"
#include "kernels/codes.h"
#include "kernels/scales.h"
#include "kernels/formats.h"
#include "kernels/bytes_plain.h"
#include "kernels/digits.h"
#include "kernels/tiles.h"
#include "kernels/packed.h"
#include "kernels/panels.h"
#include "kernels/expand.h"
#include "kernels/tile_sums.h"
#include "kernels/tile_block.h"
#include "kernels/tile_panels.h"
// clang-format on

}  // namespace proa

namespace {

constexpr int kColumns = 96;
constexpr size_t kPanelBytes = size_t(kColumns) * 32;

// Random values near one.
std::vector<uint16_t> random_values(size_t count) {
    std::vector<uint16_t> values(count);
    uint32_t state = 1;
    for (uint16_t& value : values)
        state = state * 1664525 + 1013904223, value = uint16_t((state >> 16 & 0x80ff) | 0x3f00);
    return values;
}

struct Product {
    const std::vector<uint16_t> weights = random_values(proa::kTilePanels * kPanelBytes / 2);
    const std::vector<uint16_t> lines;  // activations; blocks of tokens are as far apart as pairs would be
    const int tokens;

    explicit Product(int count)
        : lines(random_values(size_t(count) * kColumns / 2 * sizeof(proa::XPair) / 2)), tokens(count) {}

    const uint8_t* panel(int i) const {
        return reinterpret_cast<const uint8_t*>(weights.data()) + size_t(i) * kPanelBytes;
    }
    size_t panel_sums() const { return size_t(tokens) * proa::kPanelRows; }

    proa::Ahead run(int first, int panels, float* out, proa::Ahead ahead) const {
        void* data = const_cast<uint16_t*>(lines.data());
        const proa::Packed x{data, nullptr, tokens, {proa::kTileTokens, proa::Packing::kTiles, 0, 1}};
        proa::Tiles tiles;
        return proa::multiply_panels(tiles, kColumns, panel(first), kPanelBytes, panels, x, 0, out, ahead);
    }
};

// A panel's sums have the same bits, whatever other panels are multiplied with the same activations.
void panels_do_not_depend_on_their_neighbours() {
    for (int tokens = 1; tokens <= 3 * proa::kTileTokens; ++tokens) {
        const Product product(tokens);
        const float none = std::numeric_limits<float>::quiet_NaN();
        std::vector<float> apart(proa::kTilePanels * product.panel_sums(), none);
        for (int i = 0; i < proa::kTilePanels; ++i)
            product.run(i, 1, apart.data() + size_t(i) * product.panel_sums(), proa::Ahead(nullptr, 0, 1));
        for (int panels = 2; panels <= proa::kTilePanels; ++panels) {
            std::vector<float> together(size_t(panels) * product.panel_sums(), none);
            product.run(0, panels, together.data(), proa::Ahead(nullptr, 0, 1));
            CHECK(std::memcmp(together.data(), apart.data(), together.size() * sizeof(float)) == 0);
        }
    }
}

// The panels needed next are prefetched completely, however many blocks of tokens share the work.
void everything_is_prefetched() {
    const std::vector<uint8_t> next(proa::kTilePanels * kPanelBytes);
    for (int tokens = 1; tokens <= 5 * proa::kTileTokens; tokens += 7)
        for (int panels = 1; panels <= proa::kTilePanels; ++panels) {
            const Product product(tokens);
            std::vector<float> out(size_t(panels) * product.panel_sums());
            const int steps = proa::block_count(tokens, proa::kTileTokens) * (kColumns / proa::kTileColumns);
            const proa::Ahead left = product.run(0, panels, out.data(), proa::Ahead(next.data(), next.size(), steps));
            CHECK(left.at == next.data() + next.size());
        }
}

}  // namespace

int main() {
    panels_do_not_depend_on_their_neighbours();
    everything_is_prefetched();
    return 0;
}
