// Elementwise operations on one row of bfloat16, float32 inside; and the choice of experts. `out` may be an input.
#pragma once

inline void store_bf16_first(uint16_t* p, int n, F32 x) {
    if (n >= 16) return store_bf16(p, x);
    uint16_t all[16];
    store_bf16(all, x);
    for (int i = 0; i < n; ++i) p[i] = all[i];
}
inline F32 rounded_to_bf16(F32 x) { return as_f32(shl<16>(bf16_bits(x))); }

void rms_norm_row(const uint16_t* x, const uint16_t* weight, int width, float eps, float offset, uint16_t* out) {
    F32 sums[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 64 <= width; i += 64)
        for (int s = 0; s < 4; ++s) {
            const F32 value = load_bf16(x + i + 16 * s);
            sums[s] = fma(value, value, sums[s]);
        }
    for (; i < width; i += 16) {
        const F32 value = load_bf16_first(x + i, width - i);
        sums[0] = fma(value, value, sums[0]);
    }
    const float mean = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / float(width);
    const F32 scale = set(1.f / __builtin_sqrtf(mean + eps));
    for (i = 0; i < width; i += 16) {
        const F32 normed = mul(load_bf16_first(x + i, width - i), scale);
        const F32 factor = add(load_bf16_first(weight + i, width - i), set(offset));
        store_bf16_first(out + i, width - i, mul(factor, normed));
    }
}

void add_row(const uint16_t* x, const uint16_t* y, int width, uint16_t* out) {
    for (int i = 0; i < width; i += 16) {
        const int n = width - i;
        store_bf16_first(out + i, n, add(load_bf16_first(x + i, n), load_bf16_first(y + i, n)));
    }
}

// routed + sigmoid(gate) * shared, each step rounded as a bfloat16 tensor of it would be.
void gated_add_row(const uint16_t* routed, uint16_t gate, const uint16_t* shared, int width, uint16_t* out) {
    const F32 weight = rounded_to_bf16(sigmoid(set(bf16_value(gate))));
    for (int i = 0; i < width; i += 16) {
        const int n = width - i;
        const F32 weighted = rounded_to_bf16(mul(weight, load_bf16_first(shared + i, n)));
        store_bf16_first(out + i, n, add(load_bf16_first(routed + i, n), weighted));
    }
}

// x * sigmoid(gate), each step rounded as a bfloat16 tensor of it would be.
void gate_row(const uint16_t* x, const uint16_t* gate, int width, uint16_t* out) {
    for (int i = 0; i < width; i += 16) {
        const int n = width - i;
        const F32 factor = rounded_to_bf16(sigmoid(load_bf16_first(gate + i, n)));
        store_bf16_first(out + i, n, mul(factor, load_bf16_first(x + i, n)));
    }
}

// Products round before they are added, as in the reference.
inline F32 turned_first(F32 a, F32 b, F32 cos, F32 sin) { return sub(mul(a, cos), mul(b, sin)); }
inline F32 turned_second(F32 a, F32 b, F32 cos, F32 sin) { return add(mul(b, cos), mul(a, sin)); }

// The first 2 * half values of a head. Interleaved: value 2i turns with 2i + 1, else i with half + i.
void rotate_head(const uint16_t* x, const float* cos, const float* sin, int half, bool interleaved, uint16_t* out) {
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F32 c = n == 16 ? load(cos + i) : load_first(cos + i, n, 0.f);
        const F32 s = n == 16 ? load(sin + i) : load_first(sin + i, n, 0.f);
        if (!interleaved) {
            const F32 a = load_bf16_first(x + i, n), b = load_bf16_first(x + half + i, n);
            store_bf16_first(out + i, n, turned_first(a, b, c, s));
            store_bf16_first(out + half + i, n, turned_second(a, b, c, s));
            continue;
        }
        uint16_t pairs[32] = {};
        for (int k = 0; k < 2 * n; ++k) pairs[k] = x[2 * i + k];
        const U32 both = load_u32(pairs);
        const F32 a = as_f32(shl<16>(both)), b = as_f32(bit_and(both, set_u32(0xffff0000)));
        store_u32(pairs, bit_or(bf16_bits(turned_first(a, b, c, s)), shl<16>(bf16_bits(turned_second(a, b, c, s)))));
        for (int k = 0; k < 2 * n; ++k) out[2 * i + k] = pairs[k];
    }
}

inline float logit(const void* logits, bool wide, int i) {
    return wide ? ((const float*)logits)[i] : bf16_value(((const uint16_t*)logits)[i]);
}

// Of equal logits the lower id comes first; NaNs count as the lowest.
inline void choose(const void* logits, bool wide, int experts, int top_k, int32_t* ids, float* best) {
    int count = 0;
    for (int id = 0; id < experts; ++id) {
        float value = logit(logits, wide, id);
        if (!(value == value)) value = -__builtin_inff();
        if (count == top_k && !(value > best[top_k - 1])) continue;
        int place = count < top_k ? count++ : top_k - 1;
        for (; place > 0 && value > best[place - 1]; --place)
            best[place] = best[place - 1], ids[place] = ids[place - 1];
        best[place] = value, ids[place] = id;
    }
}

inline F32 load_logits(const void* logits, bool wide, int i, int n) {
    float all[16];
    for (int k = 0; k < 16; ++k) all[k] = k < n ? logit(logits, wide, i + k) : -__builtin_inff();
    return load(all);
}

// Softmax and the top_k of it. Where it is undefined (NaN or infinity among the logits) all weights are NaN.
void route_row(const void* logits, bool wide, int experts, int top_k, bool renormalise, int32_t* ids, float* weights) {
    choose(logits, wide, experts, top_k, ids, weights);
    const F32 most = set(weights[0]);
    F32 sums = zero();
    float poison = 0;
    for (int i = 0; i < experts; i += 16) {
        const F32 values = load_logits(logits, wide, i, experts - i);
        sums = add(sums, exp(sub(values, most)));
    }
    for (int i = 0; i < experts; ++i) poison += logit(logits, wide, i) != logit(logits, wide, i);
    if (poison > 0 || weights[0] - weights[0] != 0) poison = __builtin_nanf("");
    const float total = reduce_add(sums);
    float chosen = 0;
    for (int k = 0; k < top_k; ++k) {
        float lanes[16];
        store(lanes, exp(sub(set(weights[k]), most)));
        weights[k] = lanes[0] / total + poison;
        chosen += weights[k];
    }
    for (int k = 0; renormalise && k < top_k; ++k) weights[k] /= chosen;
}
