// Codes of four bits -> numbers of 16. Belongs here: looking up what the 16 codes stand for.
#pragma once

#include <cstdint>

namespace proa {

// Codes of groups that lie one after the other, `group_bytes` each, the last one maybe fewer: bytes in all. Of each
// byte tables[group][code] of both codes, that in the low bits first.
void look_up_nibbles(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes, uint16_t* to);

// The same on any processor: what tests compare with.
void look_up_nibbles_plainly(const uint16_t (*tables)[16], int group_bytes, const uint8_t* codes, int bytes,
                             uint16_t* to);

}  // namespace proa
