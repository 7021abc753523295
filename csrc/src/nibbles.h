// Converts 4-bit codes to 16-bit values. Belongs here: table lookups of the 16 values.
#pragma once

#include <cstdint>

namespace proa {

// Looks up consecutive groups of codes, `group_bytes` each (the last may be shorter), `bytes` in total: each byte gives
// tables[group][code] for both of its codes, the one in the low bits first.
void look_up_nibbles(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes, uint16_t* to);

// look_up_nibbles in portable C++, the reference for tests.
void look_up_nibbles_plainly(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes,
                             uint16_t* to);

}  // namespace proa
