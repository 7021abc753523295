// The gated delta rule (arXiv 2412.06464) and what is around it, of one token. Never: which token, where states lie.
#pragma once

constexpr int kDeltaVectors = 4;  // of 16 columns of a state that are worked on at once

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

// A vector of this length in the same direction; 1e-6 is added to its squared length.
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
    const size_t stride = size_t(s.value_dim);
    const float *value = s.value + column, *from = s.from + column;
    F32 known[kVectors], change[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) known[v] = out[v] = zero();
    for (int i = 0; i < s.key_dim; ++i) {
        const F32 key = set(s.key[i]);
        for (int v = 0; v < kVectors; ++v) known[v] = fma(key, load(from + size_t(i) * stride + 16 * v), known[v]);
    }
    const F32 decay = set(s.decay), beta = set(s.beta);
    for (int v = 0; v < kVectors; ++v) change[v] = mul(beta, sub(load(value + 16 * v), mul(decay, known[v])));
    float* to = s.to + column;
    for (int i = 0; i < s.key_dim; ++i) {
        const F32 key = set(s.key[i]), query = set(s.query[i]);
        for (int v = 0; v < kVectors; ++v) {
            const size_t at = size_t(i) * stride + size_t(16 * v);
            const F32 state = fma(key, change[v], mul(decay, load(from + at)));
            store(to + at, state);
            out[v] = fma(query, state, out[v]);
        }
    }
    for (int v = 0; v < kVectors; ++v) store(s.out + column + 16 * v, out[v]);
}

// S = decay * S + key (beta * (value - decay * S^T key))^T; out = S^T query.
void delta_step(const DeltaStep& s) {
    int column = 0;
    for (; column + 16 * kDeltaVectors <= s.value_dim; column += 16 * kDeltaVectors)
        delta_columns<kDeltaVectors>(s, column);
    for (; column < s.value_dim; column += 16) delta_columns<1>(s, column);
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
