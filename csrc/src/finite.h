// Whether stored numbers are finite. Belongs here: looking at bits. Never: which numbers a model uses, files.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stored.h"

namespace proa {

// False if one of `values` numbers is NaN or infinite: of plain types and E4M3 the number itself, of E8M0 the power of
// two, of GGUF's blocks (whole ones) a scale or minimum. Codes without such values are always finite.
bool all_finite(Stored type, const uint8_t* from, size_t values);

// The same on any processor: what tests compare with.
bool all_finite_plainly(Stored type, const uint8_t* from, size_t values);

}  // namespace proa
