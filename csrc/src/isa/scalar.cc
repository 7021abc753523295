// Plain C++: the readable reference, and the fallback for CPUs without AVX2.
#include "kernels.h"

namespace proa {
namespace {

constexpr int kMostPlain = 4, kMostScaled = 4;
constexpr int kWideFromTokens = 16;
constexpr bool fetches_in_order(int, bool) { return false; }
constexpr Blocking kBlocking = kVectorBlocking;
constexpr int rows_at_once(int, bool) { return 1; }

#include "../kernels/vec_scalar.h"
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

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("scalar"), kernels<Regime::kDecode>("scalar"),
                                       kernels<Regime::kPrompt>("scalar")};

}  // namespace

const Kernels* const kScalarKernels = kTables;

}  // namespace proa
