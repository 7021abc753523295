// y[h] = W[h] x[h] of each head h, for packed W. Never: what heads are.
#pragma once

#include <memory>

#include "host.h"
#include "matrix.h"

namespace proa {

struct HeadLinearCall;

// Lives as long as the pool may be working on it: until the program that holds it is gone, or settle().
struct HeadLinear {
    const Matrix* weights;  // a stack of one for each head
    int carried;            // values behind a head's inputs that go behind its outputs as they are
    const uint16_t* x;      // bfloat16 rows of heads that are x_apart values apart
    int64_t x_stride, x_apart;
    uint16_t* y;
    int64_t y_stride, y_apart;
    mutable std::shared_ptr<HeadLinearCall> call{};  // what a run leaves for its tasks
};

void check(const HeadLinear& op);
void run(const HeadLinear& op, Host& host, int tokens, int lane);

}  // namespace proa
