// Tests stored values for NaN and infinity. Belongs here: looking at bits. Never: which values a model uses, files.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stored.h"

namespace proa {

// False if one of `values` values is non-finite: for plain types and E4M3 the value itself, for E8M0 the power of two,
// for GGUF's blocks (whole ones) a scale or minimum. Integer codes are always finite.
bool all_finite(Stored type, const uint8_t* from, size_t values);

// all_finite in portable C++, the reference for tests.
bool all_finite_plainly(Stored type, const uint8_t* from, size_t values);

}  // namespace proa
