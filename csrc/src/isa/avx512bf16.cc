// AVX-512 with BF16, VNNI and VBMI (AMD from Zen 4, Intel from Sapphire Rapids).
#include <immintrin.h>

#include "kernels.h"

namespace proa {
namespace {

#define PROA_BYTE_TABLES 1  // codes.h looks values up by vpermi2b and vpermw
// Tokens per block: 24 sums, and weights, in 32 registers.
constexpr int kMostPlain = 12, kMostScaled = most_scaled(12);
constexpr int kWideFromTokens = 32;
// Measured on Zen 5, where a VDPBF16PS costs no more than a VPDPBUSD: digits pay for codes that are expensive to
// convert.
constexpr int digits_to_tokens(Format f) { return code_of(f) == CodeType::kInt8 ? 3 : 0; }
constexpr int digit_rows_at_once(int) { return 2; }
// Measured on Zen 5: with codes of 8 bits and more it is a little slower.
constexpr bool fetches_in_order(int bits, bool) { return bits < 8; }
constexpr Blocking kBlocking = kVectorBlocking;
constexpr int rows_at_once(int tokens, bool scaled) { return !scaled && tokens <= 2 ? 4 : 2; }

#include "../kernels/vec_avx512.h"
#include "../kernels/common.h"
#include "../kernels/dot_bf16.h"
#include "../kernels/byte_tables.h"
#include "../kernels/codes.h"
#include "../kernels/scales.h"
#include "../kernels/formats.h"
#include "../kernels/bytes_vnni.h"
#include "../kernels/digits.h"
#include "../kernels/no_tiles.h"
#include "../kernels/packed.h"
#include "../kernels/panels.h"
#include "../kernels/expand.h"
#include "../kernels/wide_panels.h"
#include "../kernels/digit_panels.h"
#include "../kernels/epilogue.h"
#include "../kernels/rows.h"
#include "../kernels/attention.h"
#include "../kernels/kv_codes.h"
#include "../kernels/delta.h"
#include "../kernels/peak.h"
#include "../kernels/table.h"

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("avx512-bf16"), kernels<Regime::kDecode>("avx512-bf16"),
                                       kernels<Regime::kPrompt>("avx512-bf16")};

}  // namespace

const Kernels* const kAvx512Bf16Kernels = kTables;

}  // namespace proa
