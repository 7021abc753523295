// NaN and infinity have the largest bit patterns of a type once the sign is masked out, so the loop takes a maximum;
// several independent ones, to hide their latency.
#include "finite.h"

#include <algorithm>
#include <cstring>

#include "words.h"

namespace proa {
namespace {

// The loops are written once and compiled for two instruction sets.
#define PROA_LOOP [[gnu::always_inline]] inline

// True if all values, masked by `mask`, are below `end`. Signed types, because SSE2 has no unsigned 16-bit maximum.
template <class T>
PROA_LOOP bool all_below(const uint8_t* from, size_t values, T mask, T end) {
    typedef T Vector __attribute__((vector_size(32), aligned(1), may_alias));
    const uint8_t* const stop = from + values * sizeof(T);
    Vector a{}, b{}, c{}, d{};
    const auto raise = [&](Vector& most, const Vector* at) __attribute__((always_inline)) {
        const Vector x = *at & mask;
        most = x > most ? x : most;
    };
    for (; size_t(stop - from) >= 4 * sizeof(Vector); from += 4 * sizeof(Vector)) {
        const auto* at = reinterpret_cast<const Vector*>(from);
        raise(a, at), raise(b, at + 1), raise(c, at + 2), raise(d, at + 3);
    }
    raise(a, &b), raise(c, &d), raise(a, &c);
    const auto too_large = a >= end;
    uint64_t found[sizeof(Vector) / 8];
    std::memcpy(found, &too_large, sizeof found);
    T largest = 0;
    for (; from < stop; from += sizeof(T)) largest = std::max(largest, T(read<T>(from) & mask));
    return largest < end && !(found[0] | found[1] | found[2] | found[3]);
}

// Tests the float16 values at these offsets of every block: adding one to an exponent of all ones carries into the
// sign.
template <class... Places>
PROA_LOOP bool halves_finite(Stored type, const uint8_t* from, size_t values, Places... places) {
    const StoredFacts facts = facts_of(type);
    uint32_t carried = 0;
    for (size_t i = 0; i < values; i += size_t(facts.block_values), from += facts.block_bytes)
        ((carried |= (read<uint16_t>(from + places) & 0x7c00u) + 0x0400u), ...);
    return !(carried & 0x8000);
}

PROA_LOOP bool finite(Stored type, const uint8_t* from, size_t values) {
    const auto halves = [&](auto... places) { return halves_finite(type, from, values, places...); };
    switch (type) {
        case Stored::kF32: return all_below<int32_t>(from, values, 0x7fffffff, 0x7f800000);
        case Stored::kF16: return all_below<int16_t>(from, values, 0x7fff, 0x7c00);
        case Stored::kBf16: return all_below<int16_t>(from, values, 0x7fff, 0x7f80);
        case Stored::kF64: return all_below<int64_t>(from, values, 0x7fffffffffffffff, 0x7ff0000000000000);
        case Stored::kE4m3: return all_below<uint8_t>(from, values, 0x7f, 0x7f);
        case Stored::kE8m0: return all_below<uint8_t>(from, values, 0xff, 0xff);
        case Stored::kQ4_0:
        case Stored::kQ5_0:
        case Stored::kQ8_0:
        case Stored::kIq4Nl:
        case Stored::kIq4Xs: return halves(0);
        case Stored::kQ4_1:
        case Stored::kQ5_1:
        case Stored::kQ4K:
        case Stored::kQ5K: return halves(0, 2);
        case Stored::kQ2K: return halves(80, 82);
        case Stored::kQ3K: return halves(108);
        case Stored::kQ6K: return halves(208);
        case Stored::kMxfp4: {
            const StoredFacts facts = facts_of(type);
            for (size_t i = 0; i < values; i += size_t(facts.block_values), from += facts.block_bytes)
                if (*from == 0xff) return false;
            return true;
        }
        case Stored::kInt8:
        case Stored::kUint8:
        case Stored::kInt4:
        case Stored::kUint4:
        case Stored::kSigned4:
        case Stored::kE2m1: return true;
    }
    return true;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool finite_by_eights(Stored type, const uint8_t* from, size_t values) {
    return finite(type, from, values);
}
#endif

}  // namespace

bool all_finite_plainly(Stored type, const uint8_t* from, size_t values) { return finite(type, from, values); }

bool all_finite(Stored type, const uint8_t* from, size_t values) {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return finite_by_eights(type, from, values);
#endif
    return all_finite_plainly(type, from, values);
}

}  // namespace proa
