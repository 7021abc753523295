// AVX2 with FMA and F16C (Intel from Haswell, AMD from Excavator).
#include <immintrin.h>

#include "kernels.h"

namespace proa {
namespace {

constexpr int kMostPlain = 5, kMostScaled = 5;  // tokens per block: a sum takes two of 16 registers
constexpr int kWideFromTokens = 16;
// Off: it makes some formats faster and others slower, and not the same ones on Zen 5 and Emerald Rapids.
constexpr bool fetches_in_order(int, bool) { return false; }
constexpr Blocking kBlocking = kVectorBlocking;
constexpr int rows_at_once(int tokens, bool) { return tokens == 1 ? 2 : 1; }

#include "../kernels/vec_avx2.h"
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

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("avx2"), kernels<Regime::kDecode>("avx2"),
                                       kernels<Regime::kPrompt>("avx2")};

}  // namespace

const Kernels* const kAvx2Kernels = kTables;

}  // namespace proa
