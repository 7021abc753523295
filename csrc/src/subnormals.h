// Flushes subnormal float32 to zero in its scope: they cost up to a hundred cycles each and do not matter here.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace proa {

class FlushSubnormals {
  public:
#if defined(__x86_64__)
    FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    unsigned before_;
#endif
};

}  // namespace proa
