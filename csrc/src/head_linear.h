// A linear layer per head, y[h] = W[h] x[h], for packed W. Never: the meaning of heads.
#pragma once

#include <memory>

#include "host.h"
#include "matrix.h"

namespace proa {

struct HeadLinearCall;

// Must live until settle(), or until its program is destroyed: late workers may still read it.
struct HeadLinear {
    const Matrix* weights;  // a stack of one for each head
    int carried;            // elements behind a head's inputs that are copied behind its outputs
    const uint16_t* x;      // bfloat16 rows of heads that start x_apart elements apart
    int64_t x_stride, x_apart;
    uint16_t* y;
    int64_t y_stride, y_apart;
    mutable std::shared_ptr<HeadLinearCall> call{};  // arguments of a run for its tasks
};

void check(const HeadLinear& op);
void run(const HeadLinear& op, Host& host, int tokens, int lane);

}  // namespace proa
