// The table of packed formats. A format is one row of PROA_FORMATS: a type of code (quantised or 16-bit value), a type
// of scale, and the columns that share a scale. Everything else about formats follows from it, here and, through
// proa_get_formats, in Python. Belongs here: facts. Never: arithmetic on weights.
#pragma once

#include <cstdint>

#include "proa/native.h"

namespace proa {

enum class CodeType : int32_t { kBf16, kFp16, kE4m3, kInt8, kInt4, kUint4, kE2m1, kInt6, kUint6 };

struct CodeFacts {
    const char* name;
    int bits;       // of a code in a panel
    int values;     // per unit of a row: the codes in `words` 32-bit words
    int words;      // lines of a panel that hold a unit of each row
    bool has_min;   // a weight is code * scale + minimum
    bool integers;  // small integers, which digits.h multiplies; else floats of 8 or 16 bits
};

constexpr CodeFacts kCodes[] = {
    {"bf16", 16, 2, 1, false, false},  // bfloat16
    {"fp16", 16, 2, 1, false, false},  // float16
    {"e4m3", 8, 4, 1, false, false},   // 8-bit floats
    {"int8", 8, 4, 1, false, true},    // two's complement
    {"int4", 4, 8, 1, false, true},    // code - 8
    {"uint4", 4, 8, 1, true, true},    // code
    {"e2m1", 4, 8, 1, false, true},    // 4-bit floats: multiples of a half
    {"int6", 6, 16, 3, false, true},   // code - 32
    {"uint6", 6, 16, 3, true, true},   // code; five bits are stored in six
};

enum class ScaleType : int32_t { kNone, kF32, kF16, kBf16, kF32Panel, kE8m0, kE4m3, kBlock8, kBlock16 };

struct ScaleFacts {
    const char* name;
    int bytes;         // per group and panel; minimums take as many
    int block_groups;  // groups that share a second-level scale; 1: there is none
    int block_bytes;   // of the second level, before the block's scales; minimums take as many
    int tail_bytes;    // once per panel, before all scales
};

constexpr ScaleFacts kScales[] = {
    {"none", 0, 1, 0, 0},
    {"f32", 64, 1, 0, 0},
    {"f16", 32, 1, 0, 0},
    {"bf16", 32, 1, 0, 0},
    {"f32_panel", 4, 1, 0, 0},   // one float32 for all rows of a panel: blocks of 128 x 128,
                                 // whole tensors
    {"e8m0", 16, 1, 0, 0},       // powers of two
    {"e4m3", 16, 1, 0, 64},      // 8-bit floats, and a float32 for the panel
    {"block8", 16, 8, 32, 0},    // 8-bit integers, times a float16 for 8 groups: GGUF's Q4_K, Q5_K
    {"block16", 16, 16, 32, 0},  // signed 8-bit integers, times a float16 for 16 groups: GGUF's Q6_K
};

// ROW(identifier, name, code, scale, group, usual group, its label). A row's index is the format's number in the C ABI.
// The usual group is one that checkpoints have, for benchmarks and tests; the label names that form.
#define PROA_FORMATS(ROW)                                                                \
    ROW(kBf16, "bf16", kBf16, kNone, 0, 0, "bf16")                                       \
    ROW(kFp16, "fp16", kFp16, kNone, 0, 0, "fp16")                                       \
    ROW(kFp8Row, "fp8_row", kE4m3, kF32, PROA_ANY_GROUP, 0, "fp8-channel")               \
    ROW(kFp8Panel, "fp8_panel", kE4m3, kF32Panel, PROA_ANY_GROUP, 128, "fp8-block")      \
    ROW(kMxfp8, "mxfp8", kE4m3, kE8m0, 32, 32, "mxfp8")                                  \
    ROW(kInt8F32, "int8_f32", kInt8, kF32, PROA_ANY_GROUP, 0, "int8")                    \
    ROW(kInt8F16, "int8_f16", kInt8, kF16, PROA_ANY_GROUP, 32, "int8-g32")               \
    ROW(kInt4F32, "int4_f32", kInt4, kF32, PROA_ANY_GROUP, 128, "int4-f32-g128")         \
    ROW(kInt4F16, "int4_f16", kInt4, kF16, PROA_ANY_GROUP, 32, "int4-g32")               \
    ROW(kInt4Bf16, "int4_bf16", kInt4, kBf16, PROA_ANY_GROUP, 128, "int4-g128")          \
    ROW(kUint4F32, "uint4_f32", kUint4, kF32, PROA_ANY_GROUP, 16, "uint4-f32-g16")       \
    ROW(kUint4F16, "uint4_f16", kUint4, kF16, PROA_ANY_GROUP, 32, "uint4-g32")           \
    ROW(kUint4Bf16, "uint4_bf16", kUint4, kBf16, PROA_ANY_GROUP, 128, "uint4-bf16-g128") \
    ROW(kNvfp4, "nvfp4", kE2m1, kE4m3, 16, 16, "nvfp4")                                  \
    ROW(kMxfp4, "mxfp4", kE2m1, kE8m0, 32, 32, "mxfp4")                                  \
    ROW(kQ4K, "q4_k", kUint4, kBlock8, 32, 32, "q4_k")                                   \
    ROW(kQ6K, "q6_k", kInt6, kBlock16, 16, 16, "q6_k")                                   \
    ROW(kQ5K, "q5_k", kUint6, kBlock8, 32, 32, "q5_k")

#define PROA_IDENTIFIER(identifier, ...) identifier,
enum class Format : int32_t { PROA_FORMATS(PROA_IDENTIFIER) };
#undef PROA_IDENTIFIER

struct FormatFacts {
    const char *name, *label;
    CodeType code_type;
    ScaleType scale_type;
    int group;  // columns that share a scale; 0: there are no scales; PROA_ANY_GROUP
    int usual_group;
    int code_bits;
    int scale_bytes;        // per group and panel, minimums included
    int block_groups;       // groups that share a second-level scale
    int block_scale_bytes;  // of the second level, minimums included
    int tail_bytes;
    bool has_min;

    constexpr const CodeFacts& code() const { return kCodes[int(code_type)]; }
};

constexpr FormatFacts format_facts(const char* name, CodeType code, ScaleType scale, int group, int usual_group,
                                   const char* label) {
    const CodeFacts& c = kCodes[int(code)];
    const ScaleFacts& s = kScales[int(scale)];
    const int vectors = c.has_min ? 2 : 1;
    return {name,           label,
            code,           scale,
            group,          usual_group,
            c.bits,         vectors * s.bytes,
            s.block_groups, vectors * s.block_bytes,
            s.tail_bytes,   c.has_min};
}

#define PROA_FACTS(identifier, name, code, scale, group, usual_group, label) \
    format_facts(name, CodeType::code, ScaleType::scale, group, usual_group, label),
constexpr FormatFacts kFacts[] = {PROA_FORMATS(PROA_FACTS)};
#undef PROA_FACTS
constexpr int kFormats = int(sizeof kFacts / sizeof *kFacts);

constexpr const FormatFacts& facts_of(Format format) { return kFacts[int(format)]; }
constexpr CodeType code_of(Format format) { return facts_of(format).code_type; }
constexpr bool is_plain(Format format) { return facts_of(format).scale_type == ScaleType::kNone; }

}  // namespace proa
