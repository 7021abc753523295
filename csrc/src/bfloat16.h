// float32 <-> bfloat16 of whole rows. Belongs here: rounding, and scaling what is stored as bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

// float32 rounded to bfloat16, to the nearest, ties to even; a NaN becomes the quiet one.
void round_to_bf16(const float* from, size_t values, uint16_t* to);

// Each group's bfloat16 numbers times its scale times `factor`, plus its minimum, rounded once. The last group may be
// shorter than `group`.
void scale_bf16(uint16_t* values, int count, int group, const float* scales, const float* minimums, float factor);

// The same on any processor: what tests compare with.
void round_to_bf16_plainly(const float* from, size_t values, uint16_t* to);
void scale_bf16_plainly(uint16_t* values, int count, int group, const float* scales, const float* minimums,
                        float factor);

}  // namespace proa
