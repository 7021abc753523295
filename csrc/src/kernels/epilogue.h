// What happens to sums before they become activations: bias, activation, weighting, conversion. Sums lie as
// [panels][tokens][16]; see Kernels in isa/kernels.h for every function's contract.
#pragma once

inline F32 gelu_tanh(F32 x) {  // x/2 (1 + tanh(u)) = x sigmoid(2 u)
    const F32 cube = mul(mul(x, x), x);
    return mul(x, sigmoid(mul(set(1.5957691216057308f), fma(set(0.044715f), cube, x))));
}

inline F32 gated(Activation kind, F32 gate, F32 up, float limit) {
    switch (kind) {
        case Activation::kSilu: return mul(mul(gate, sigmoid(gate)), up);
        case Activation::kGeluTanh: return mul(gelu_tanh(gate), up);
        case Activation::kClampedSwiglu: {  // gpt-oss: (up + 1) gate sigmoid(1.702 gate), both clamped
            const F32 g = min(gate, set(limit)), u = max(min(up, set(limit)), set(-limit));
            return mul(add(u, set(1.f)), mul(g, sigmoid(mul(g, set(1.702f)))));
        }
        case Activation::kNone: return gate;
        case Activation::kRelu2: break;
    }
    const F32 positive = max(gate, zero());
    return mul(positive, positive);
}

// Calls f(first token, tokens, pairs, sums or null) for each block of packed rows.
template <class F>
inline void each_block(const Packed& packed, int padded, F&& f) {
    const int blocks = block_count(packed.tokens, packed.block_tokens);
    for (int i = 0; i < blocks; ++i) {
        const int begin = block_begin(packed.tokens, blocks, i);
        f(begin, block_begin(packed.tokens, blocks, i + 1) - begin, (XPair*)packed.pairs + size_t(begin) * (padded / 2),
          packed.sums ? packed.sums + size_t(begin) * (padded / 16) : nullptr);
    }
}

void activate(Activation kind, float limit, const float* sums, const float* bias, int first, int end, int padded,
              const Packed& out) {
    const bool has_up = kind < Activation::kRelu2;
    for (int panel = first; panel < end; ++panel) {
        const float* gate = sums + size_t(panel - first) * (has_up ? 2 : 1) * out.tokens * 16;
        const float* up = gate + size_t(out.tokens) * 16;
        const float* gate_bias = bias ? bias + size_t(panel) * (has_up ? 32 : 16) : nullptr;
        const F32 b = gate_bias ? load(gate_bias) : zero(), c = gate_bias && has_up ? load(gate_bias + 16) : zero();
        each_block(out, padded, [&](int begin, int size, XPair* block, float* block_sums) {
            XPair* pairs = block + size_t(panel) * 8 * size;
            for (int t = 0; t < size; ++t) {
                const size_t at = size_t(begin + t) * 16;
                const F32 u = has_up ? add(load(up + at), c) : zero();
                const U32 bits = bf16_bits(gated(kind, add(load(gate + at), b), u, limit));
                uint16_t h[16];
                store_u16(h, bits);
                for (int k = 0; k < 8; ++k) pairs[k * size + t] = make_xpair(h[2 * k], h[2 * k + 1]);
                if (block_sums) block_sums[size_t(panel) * size + t] = reduce_add(as_f32(shl<16>(bits)));
            }
        });
    }
}

void clear_columns(int first, int padded, const Packed& out) {
    each_block(out, padded, [&](int, int size, XPair* pairs, float* sums) {
        for (size_t k = size_t(first / 2) * size; k < size_t(padded / 2) * size; ++k) pairs[k] = make_xpair(0, 0);
        if (!sums) return;
        for (size_t k = size_t(first / 16) * size; k < size_t(padded / 16) * size; ++k) sums[k] = 0;
    });
}

void accumulate(const float* part, int panels, int tokens, const int32_t* index, const float* weights,
                const float* bias, float* total, int total_tokens) {
    for (int panel = 0; panel < panels; ++panel) {
        const F32 b = bias ? load(bias + panel * 16) : zero();
        for (int t = 0; t < tokens; ++t) {
            float* to = total + (size_t(panel) * total_tokens + index[t]) * 16;
            store(to, fma(set(weights[t]), add(load(part + (size_t(panel) * tokens + t) * 16), b), load(to)));
        }
    }
}

void store_rows(const float* sums, int panels, int tokens, const float* bias, int columns, bool wide, void* out,
                size_t stride) {
    for (int panel = 0; panel < panels; ++panel) {
        const int left = columns - panel * 16;
        const F32 b = bias ? load_first(bias + panel * 16, left < 16 ? left : 16, 0.f) : zero();
        for (int t = 0; t < tokens; ++t) {
            const F32 y = add(load(sums + (size_t(panel) * tokens + t) * 16), b);
            const size_t at = size_t(t) * stride + size_t(panel) * 16;
            if (left >= 16) {
                if (wide)
                    store((float*)out + at, y);
                else
                    store_bf16((uint16_t*)out + at, y);
                continue;
            }
            float rest[16];
            store(rest, y);
            for (int i = 0; i < left; ++i) {
                if (wide)
                    ((float*)out)[at + i] = rest[i];
                else
                    ((uint16_t*)out)[at + i] = to_bf16(rest[i]);
            }
        }
    }
}
