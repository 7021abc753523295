// float32 <-> bfloat16 for whole rows. Belongs here: rounding, and scaling of bfloat16 values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa {

// Rounds float32 to bfloat16, to nearest, ties to even; a NaN becomes quiet.
void round_to_bf16(const float* from, size_t values, uint16_t* to);

// Multiplies each group's bfloat16 values by its scale and `factor`, adds its minimum, rounds once. The last group may
// be shorter than `group`.
void scale_bf16(uint16_t* values, int count, int group, const float* scales, const float* minimums, float factor);

// round_to_bf16 in portable C++, the reference for tests.
void round_to_bf16_plainly(const float* from, size_t values, uint16_t* to);
void scale_bf16_plainly(uint16_t* values, int count, int group, const float* scales, const float* minimums,
                        float factor);

}  // namespace proa
