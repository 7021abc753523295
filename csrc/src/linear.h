// y = x W^T + b for packed W. Never: experts.
#pragma once

#include <memory>

#include "host.h"
#include "matrix.h"

namespace proa {

struct LinearCall;

// Must live until settle(), or until its program is destroyed: late workers may still read it.
struct Linear {
    const Matrix* weights;  // a stack of one
    int outputs;            // rows to store, at most those of the matrix
    const float* bias;      // [outputs] or null
    const uint16_t* x;      // bfloat16 rows
    int64_t x_stride;
    void* y;  // bfloat16 rows, float32 if wide
    int64_t y_stride;
    bool wide;
    mutable std::shared_ptr<LinearCall> call{};  // arguments of a run for its tasks
};

inline void check(const Linear&) {}  // the C interface has checked the arguments
void run(const Linear& op, Host& host, int tokens, int lane);

}  // namespace proa
