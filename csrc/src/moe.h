// The routed experts of a batch: y[t] = sum over its experts e, ascending, of weight * down_e(act(gate_e x, up_e x)).
// A dense gated MLP is one expert with weight 1. Never: routing.
#pragma once

#include <memory>

#include "host.h"
#include "matrix.h"

namespace proa {

struct Experts {
    const Matrix* gate_up;  // panels of gate and up alternate; without has_gate only up
    const Matrix* down;
    Activation activation;
    float limit;             // of the clamped SwiGLU
    const float* gate_bias;  // [experts][rows of gate_up] in its panels' order, or null
    const float* down_bias;  // [experts][padded rows of down], or null
};

struct MoeCall;
class Pieces;

// Must live until settle(), or until its program is destroyed: late workers may still read it.
struct Moe {
    const Experts* experts;
    int top_k;             // 0: every token to expert 0 with weight 1
    const int32_t* ids;    // [tokens][top_k]; -1: no expert
    const float* weights;  // [tokens][top_k]
    const uint16_t* x;
    int64_t x_stride;
    void* y;  // bfloat16, float32 if wide
    int64_t y_stride;
    bool wide;
    const Pieces* ahead = nullptr;            // weights of these experts that workers have prefetched
    mutable std::shared_ptr<MoeCall> call{};  // arguments of a run for its tasks
};

// Throws Error (argument) for an id out of range.
inline void check(const Moe&) {}  // the C interface has checked the arguments
void run(const Moe& op, Host& host, int tokens, int lane);

}  // namespace proa
