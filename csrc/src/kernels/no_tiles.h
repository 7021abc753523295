// Replaces tiles.h and tile_panels.h for instruction sets without matrix tiles.
#pragma once

constexpr bool kTiles = false;
constexpr int most_pairs(Format f) { return is_plain(f) ? kMostPlain : kMostScaled; }
constexpr int pairs_below(Format) { return kWideFromTokens; }
inline bool by_tiles(const Layout&, int) { return false; }
inline size_t tile_scratch_bytes(const Layout&, bool) { return 0; }
inline void multiply_tiles(const Layout&, const uint8_t*, int, const Packed&, float*, uint8_t*, const uint8_t*) {}
inline double tile_peak(int64_t, float, float*) { return 0; }
