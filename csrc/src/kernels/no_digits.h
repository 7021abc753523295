// Replaces digits.h and digit_panels.h for instruction sets without integer dot products.
#pragma once

constexpr int kDigitColumns = 16;
constexpr int digit_tokens(Format) { return 0; }
constexpr int digit_rows_at_once(int) { return 1; }
inline bool by_digits(const Layout&, int) { return false; }
inline Packing digit_packing(const Layout&) { return {}; }
inline void put_digits(const Packing&, uint8_t*, U32) {}
inline void multiply_digits(const Layout&, const uint8_t*, int, const Packed&, float*, const uint8_t*) {}
