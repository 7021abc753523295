// AMX beside AVX-512 with BF16, VNNI and VBMI, and GFNI (Intel from Sapphire Rapids).
#include <immintrin.h>

#include "kernels.h"

namespace proa {
namespace {

#define PROA_BYTE_TABLES 1                        // codes.h looks values up by vpermi2b and vpermw
constexpr int kMostPlain = 12, kMostScaled = 12;  // tokens per block: 24 sums, and weights, in 32 registers
constexpr int kWideFromTokens = 16;
// From three tokens on, the vector kernels spend most of their time converting fp8, which those with tiles do once for
// all tokens.
constexpr int tiles_from_tokens(Format f) { return code_of(f) == CodeType::kE4m3 ? 3 : 5; }
constexpr int digits_to_tokens(Format f) { return tiles_from_tokens(f) - 1; }
constexpr int digit_rows_at_once(int) { return 4; }
// True for codes that are cheap to convert (decision 012); for the others, more prefetch instructions cost more than
// they save.
constexpr bool fetches_in_order(int bits, bool integer) { return bits == 16 || (bits == 8 && integer); }
constexpr Blocking kBlocking = kTileBlocking;
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

constexpr Kernels kTables[kRegimes] = {kernels<Regime::kByRows>("amx"), kernels<Regime::kDecode>("amx"),
                                       kernels<Regime::kPrompt>("amx")};

}  // namespace

const Kernels* const kAmxKernels = kTables;

}  // namespace proa
