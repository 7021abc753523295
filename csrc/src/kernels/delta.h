// The gated delta rule (arXiv 2412.06464), its convolution and gated norm, for one token. Never: which token, where
// states are stored.
#pragma once

constexpr int kDeltaVectors = kVectorRegisters >= 32 ? 4 : 2;  // vectors of 16 columns of a state processed at once

// out[i] = silu(sum of x[t][i] * taps[t * stride + i] over t < count).
void convolve(const uint16_t* const* x, const float* taps, size_t stride, int count, int width, float* out) {
    for (int i = 0; i < width; i += 16) {
        const int n = width - i < 16 ? width - i : 16;
        F32 sum = zero();
        for (int t = 0; t < count; ++t) {
            const float* tap = taps + size_t(t) * stride + i;
            sum = fma(load_bf16_first(x[t] + i, n), n == 16 ? load(tap) : load_first(tap, n, 0.f), sum);
        }
        float all[16];
        store(n == 16 ? out + i : all, mul(sum, sigmoid(sum)));
        for (int k = 0; k < n && n < 16; ++k) out[i + k] = all[k];
    }
}

// Scales a vector to this length, with epsilon 1e-6 added to its squared length.
void scale_to(float* x, int width, float length) {
    F32 sums = zero();
    for (int i = 0; i < width; i += 16) {
        const F32 value = width - i < 16 ? load_first(x + i, width - i, 0.f) : load(x + i);
        sums = fma(value, value, sums);
    }
    const float factor = length / __builtin_sqrtf(reduce_add(sums) + 1e-6f);
    for (int i = 0; i < width; ++i) x[i] *= factor;
}

template <int kVectors>
inline void delta_columns(const DeltaStep& s, int column) {
    const float* from = s.from + column;
    F32 known[2][kVectors], change[kVectors], out[kVectors];  // two independent sums each, to hide latency
    for (int v = 0; v < kVectors; ++v) known[0][v] = known[1][v] = out[v] = zero();
    for (int i = 0; i + 1 < s.key_dim; i += 2)
        for (int k = 0; k < 2; ++k) {
            const F32 key = set(s.key[i + k]);
            const float* row = from + size_t(i + k) * s.from_stride;
            for (int v = 0; v < kVectors; ++v) known[k][v] = fma(key, load(row + 16 * v), known[k][v]);
        }
    if (s.key_dim % 2) {
        const F32 key = set(s.key[s.key_dim - 1]);
        const float* row = from + size_t(s.key_dim - 1) * s.from_stride;
        for (int v = 0; v < kVectors; ++v) known[0][v] = fma(key, load(row + 16 * v), known[0][v]);
    }
    const F32 decay = set(s.decay), beta = set(s.beta);
    for (int v = 0; v < kVectors; ++v) {
        const F32 found = mul(decay, add(known[0][v], known[1][v]));
        change[v] = mul(beta, sub(load(s.value + column + 16 * v), found));
    }
    float* to = s.to + column;
    for (int i = 0; i < s.key_dim; ++i) {
        const F32 key = set(s.key[i]), query = set(s.query[i]);
        for (int v = 0; v < kVectors; ++v) {
            const F32 state = fma(key, change[v], mul(decay, load(from + size_t(i) * s.from_stride + 16 * v)));
            store(to + size_t(i) * s.to_stride + 16 * v, state);
            out[v] = fma(query, state, out[v]);
        }
    }
    for (int v = 0; v < kVectors; ++v) store(s.out + column + 16 * v, out[v]);
}

// S = decay * S + key (beta * (value - decay * S^T key))^T; out = S^T query.
void delta_step(const DeltaStep& s) {
    int column = 0;
    for (; column + 16 * kDeltaVectors <= s.columns; column += 16 * kDeltaVectors)
        delta_columns<kDeltaVectors>(s, column);
    for (; column < s.columns; column += 16) delta_columns<1>(s, column);
}

// out = x / rms(x) * weight * silu(gate).
void gated_norm_row(const float* x, const uint16_t* weight, const uint16_t* gate, int width, float eps, uint16_t* out) {
    F32 sums = zero();
    for (int i = 0; i < width; i += 16) {
        const F32 value = load(x + i);
        sums = fma(value, value, sums);
    }
    const F32 scale = set(1.f / __builtin_sqrtf(reduce_add(sums) / float(width) + eps));
    for (int i = 0; i < width; i += 16) {
        const F32 z = load_bf16(gate + i), normed = mul(load_bf16(weight + i), mul(load(x + i), scale));
        store_bf16(out + i, mul(normed, mul(z, sigmoid(z))));
    }
}
