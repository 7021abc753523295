// AVX-512 F, BW, VL, DQ without BF16 (Intel from Skylake-X to Ice Lake).
#include <immintrin.h>

#include "kernels.h"

namespace proa {
namespace {

constexpr int kMostPlain = 12, kMostScaled = most_scaled(6);
constexpr int kWideFromTokens = 32;
// Measured on Emerald Rapids: CPUs with AVX-512 but without BF16 are Intel's.
constexpr bool fetches_in_order(int bits, bool) { return bits == 16; }
constexpr Blocking kBlocking = kVectorBlocking;
constexpr int rows_at_once(int tokens, bool scaled) { return tokens <= (scaled ? 2 : 3) ? 4 : 2; }

#include "../kernels/vec_avx512.h"
#include "../kernels/common.h"
#include "../kernels/dot_f32.h"
#include "../kernels/codes.h"
#include "../kernels/scales.h"
#include "../kernels/formats.h"
#include "../kernels/no_digits.h"
#include "../kernels/no_tiles.h"
#include "../kernels/packed.h"
#include "../kernels/panels.h"
#include "../kernels/expand.h"
#include "../kernels/wide_panels.h"
#include "../kernels/epilogue.h"
#include "../kernels/rows.h"
#include "../kernels/attention.h"
#include "../kernels/kv_codes.h"
#include "../kernels/delta.h"
#include "../kernels/peak.h"
#include "../kernels/table.h"

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("avx512"), kernels<Regime::kDecode>("avx512"),
                                       kernels<Regime::kPrompt>("avx512")};

}  // namespace

const Kernels* const kAvx512Kernels = kTables;

}  // namespace proa
