// Plain C++ with emulated matrix tiles: the algorithms of AMX, for tests on any CPU. Selected by name only.
#include "kernels.h"

namespace proa {
namespace {

constexpr int kMostPlain = 4, kMostScaled = 4;
constexpr int kWideFromTokens = 16;
constexpr int tiles_from_tokens(Format f) { return code_of(f) == CodeType::kE4m3 ? 3 : 5; }
constexpr int digits_to_tokens(Format f) { return tiles_from_tokens(f) - 1; }
constexpr int digit_rows_at_once(int) { return 1; }
constexpr bool fetches_in_order(int, bool) { return false; }
constexpr Blocking kBlocking = {0,   64, 64,
                                256, 4,  64 << 10};  // small, so that small tests have several groups and tasks
constexpr int rows_at_once(int, bool) { return 1; }

#include "../kernels/vec_scalar.h"
#include "../kernels/common.h"
#include "../kernels/dot_f32.h"
#include "../kernels/codes.h"
#include "../kernels/scales.h"
#include "../kernels/formats.h"
#include "../kernels/bytes_plain.h"
#include "../kernels/digits.h"
#include "../kernels/tiles.h"
#include "../kernels/packed.h"
#include "../kernels/panels.h"
#include "../kernels/expand.h"
#include "../kernels/wide_panels.h"
#include "../kernels/digit_panels.h"
#include "../kernels/tile_sums.h"
#include "../kernels/tile_block.h"
#include "../kernels/tile_panels.h"
#include "../kernels/epilogue.h"
#include "../kernels/rows.h"
#include "../kernels/attention.h"
#include "../kernels/kv_codes.h"
#include "../kernels/delta.h"
#include "../kernels/peak.h"
#include "../kernels/table.h"

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("scalar-tiles"),
                                       kernels<Regime::kDecode>("scalar-tiles"),
                                       kernels<Regime::kPrompt>("scalar-tiles")};

}  // namespace

const Kernels* const kScalarTilesKernels = kTables;

}  // namespace proa
