// The epilogue of products: bias, activation, weighting, conversion. Sums are [panels][tokens][16]; see Kernels in
// isa/kernels.h for the contract of each function.
#pragma once

// With a NaN operand, min and max return the second operand: NaN propagates.
inline F32 gated(Activation kind, F32 gate, F32 up, float limit) {
    switch (kind) {
        case Activation::kSilu: return mul(mul(gate, sigmoid(gate)), up);
        case Activation::kClampedSwiglu: {  // gpt-oss: (up + 1) gate sigmoid(1.702 gate), both clamped
            const F32 g = min(set(limit), gate), u = max(set(-limit), min(set(limit), up));
            return mul(add(u, set(1.f)), mul(g, sigmoid(mul(g, set(1.702f)))));
        }
        case Activation::kNone: return gate;
        case Activation::kRelu2: break;
    }
    const F32 positive = max(zero(), gate);
    return mul(positive, positive);
}

void activate(Activation kind, float limit, const float* sums, const float* bias, int first, int end, int padded,
              const Packed& out) {
    const bool has_up = has_gate(kind);
    // Calls put() with the bits of a panel's rows, token by token.
    const auto each_token = [&](int panel, const PackedBlock& block, auto&& put) {
        const float* gate = sums + size_t(panel - first) * (has_up ? 2 : 1) * out.tokens * 16;
        const float* up = gate + size_t(out.tokens) * 16;
        const float* gate_bias = bias ? bias + size_t(panel) * (has_up ? 32 : 16) : nullptr;
        const F32 b = gate_bias ? load(gate_bias) : zero(), c = gate_bias && has_up ? load(gate_bias + 16) : zero();
        for (int t = 0; t < block.size; ++t) {
            const size_t at = size_t(block.first + t) * 16;
            const F32 u = has_up ? add(load(up + at), c) : zero();
            const U32 bits = bf16_bits(gated(kind, add(load(gate + at), b), u, limit));
            put(t, bits);
            if (block.sums) block.sums[size_t(panel) * block.size + t] = reduce_add(as_f32(shl<16>(bits)));
        }
    };
    for (int panel = first; panel < end; panel += 2) {
        const int some = panel + 1 < end ? 2 : 1;
        each_block(out, padded, [&](const PackedBlock& block) {
            if (!block.in_pairs()) {
                for (int i = panel; i < panel + some; ++i)
                    each_token(i, block, [&](int t, U32 bits) { block.put16(i, t, bits); });
                return;
            }
            uint16_t values[kMostPairTokens][32];
            const uint16_t* rows[kMostPairTokens];
            for (int i = 0; i < some; ++i)
                each_token(panel + i, block, [&](int t, U32 bits) { store_u16(values[t] + 16 * i, bits); });
            for (int t = 0; t < block.size; ++t) rows[t] = values[t];
            block.put_pairs(16 * panel, 16 * some, 0, block.size, rows, 0);
        });
    }
}

void clear_columns(int first, int padded, const Packed& out) {
    each_block(out, padded, [&](const PackedBlock& block) {
        for (int i = first / 16; i < padded / 16; ++i)
            for (int t = 0; t < block.size; ++t) {
                if (!block.in_pairs()) block.put16(i, t, set_u32(0));
                if (block.sums) block.sums[size_t(i) * block.size + t] = 0;
            }
        if (block.in_pairs())
            __builtin_memset(block.pairs() + size_t(first / 2) * block.size, 0,
                             size_t(padded - first) / 2 * block.size * sizeof(XPair));
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

// Stores 16 columns, or the first `left` of them, at column `at` of a row.
inline void store_columns(void* row, size_t at, bool wide, int left, F32 y) {
    if (left >= 16) return wide ? store((float*)row + at, y) : store_bf16((uint16_t*)row + at, y);
    float rest[16];
    store(rest, y);
    for (int i = 0; i < left; ++i) {
        if (wide)
            ((float*)row)[at + i] = rest[i];
        else
            ((uint16_t*)row)[at + i] = to_bf16(rest[i]);
    }
}

void sum_rows(const float* rows, size_t stride, const int32_t* slots, const float* weights, int count, int columns,
              bool wide, void* out) {
    for (int at = 0; at < columns; at += 16) {
        F32 sum = zero();
        for (int i = 0; i < count; ++i) sum = fma(set(weights[i]), load(rows + size_t(slots[i]) * stride + at), sum);
        store_columns(out, at, wide, columns - at, sum);
    }
}

void store_rows(const float* sums, int panels, int tokens, const float* bias, int columns, bool wide, void* out,
                size_t stride) {
    for (int t = 0; t < tokens; ++t)
        for (int panel = 0; panel < panels; ++panel) {
            const int left = columns - panel * 16;
            const F32 b = bias ? load_first(bias + panel * 16, left < 16 ? left : 16, 0.f) : zero();
            const F32 y = add(load(sums + (size_t(panel) * tokens + t) * 16), b);
            store_columns(out, size_t(t) * stride + size_t(panel) * 16, wide, left, y);
        }
}
