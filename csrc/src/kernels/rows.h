// Elementwise operations on one row of bfloat16, computed in float32; and routing. `out` may be an input.
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

// routed + sigmoid(gate) * shared, each step rounded to bfloat16, as in the reference.
void gated_add_row(const uint16_t* routed, uint16_t gate, const uint16_t* shared, int width, uint16_t* out) {
    const F32 weight = rounded_to_bf16(sigmoid(set(bf16_value(gate))));
    for (int i = 0; i < width; i += 16) {
        const int n = width - i;
        const F32 weighted = rounded_to_bf16(mul(weight, load_bf16_first(shared + i, n)));
        store_bf16_first(out + i, n, add(load_bf16_first(routed + i, n), weighted));
    }
}

// x * sigmoid(gate), each step rounded to bfloat16, as in the reference.
void gate_row(const uint16_t* x, const uint16_t* gate, int width, uint16_t* out) {
    for (int i = 0; i < width; i += 16) {
        const int n = width - i;
        const F32 factor = rounded_to_bf16(sigmoid(load_bf16_first(gate + i, n)));
        store_bf16_first(out + i, n, mul(factor, load_bf16_first(x + i, n)));
    }
}

// Products round before they are added, as in the reference.
inline F32 rotated_first(F32 a, F32 b, F32 cos, F32 sin) { return sub(mul(a, cos), mul(b, sin)); }
inline F32 rotated_second(F32 a, F32 b, F32 cos, F32 sin) { return add(mul(b, cos), mul(a, sin)); }

// Rotates the first 2 * half values of a head. Interleaved: pairs are (2i, 2i + 1), else (i, half + i).
void rotate_head(const uint16_t* x, const float* cos, const float* sin, int half, bool interleaved, uint16_t* out) {
    for (int i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F32 c = n == 16 ? load(cos + i) : load_first(cos + i, n, 0.f);
        const F32 s = n == 16 ? load(sin + i) : load_first(sin + i, n, 0.f);
        if (!interleaved) {
            const F32 a = load_bf16_first(x + i, n), b = load_bf16_first(x + half + i, n);
            store_bf16_first(out + i, n, rotated_first(a, b, c, s));
            store_bf16_first(out + half + i, n, rotated_second(a, b, c, s));
            continue;
        }
        uint16_t pairs[32] = {};
        for (int k = 0; k < 2 * n; ++k) pairs[k] = x[2 * i + k];
        const U32 both = load_u32(pairs);
        const F32 a = as_f32(shl<16>(both)), b = as_f32(bit_and(both, set_u32(0xffff0000)));
        store_u32(pairs, bit_or(bf16_bits(rotated_first(a, b, c, s)), shl<16>(bf16_bits(rotated_second(a, b, c, s)))));
        for (int k = 0; k < 2 * n; ++k) out[2 * i + k] = pairs[k];
    }
}

inline float logit(const void* logits, bool wide, int i) {
    return wide ? ((const float*)logits)[i] : bf16_value(((const uint16_t*)logits)[i]);
}

// Top-k by keys: among equal keys the lower id comes first; NaN counts as the lowest. best: workspace [top_k].
inline void choose(const float* keys, int experts, int top_k, int32_t* ids, float* best) {
    int count = 0;
    for (int id = 0; id < experts; ++id) {
        float value = keys[id];
        if (!(value == value)) value = -__builtin_inff();
        if (count == top_k && !(value > best[top_k - 1])) continue;
        int place = count < top_k ? count++ : top_k - 1;
        for (; place > 0 && value > best[place - 1]; --place)
            best[place] = best[place - 1], ids[place] = ids[place - 1];
        best[place] = value, ids[place] = id;
    }
}

// The sum of a group's best one or two keys.
inline float group_merit(const float* keys, int size, int best_of) {
    float first = -__builtin_inff(), second = first;
    for (int i = 0; i < size; ++i) {
        if (keys[i] > first)
            second = first, first = keys[i];
        else if (keys[i] > second)
            second = keys[i];
    }
    return best_of == 1 ? first : first + second;
}

// Sets the keys of all but the best groups to -inf; among equal groups the first are kept.
inline void leave_groups_out(float* keys, const RouterRule& rule) {
    const int size = rule.experts / rule.groups;
    float merits[kMostExpertGroups];
    for (int g = 0; g < rule.groups; ++g) merits[g] = group_merit(keys + g * size, size, rule.best_of);
    for (int g = 0; g < rule.groups; ++g) {
        int better = 0;
        for (int other = 0; other < rule.groups; ++other)
            better += merits[other] > merits[g] || (merits[other] == merits[g] && other < g);
        for (int i = g * size; better >= rule.kept && i < (g + 1) * size; ++i) keys[i] = -__builtin_inff();
    }
}

inline F32 load_logits(const void* logits, bool wide, int i, int n) {
    float all[16];
    for (int k = 0; k < 16; ++k) all[k] = k < n ? logit(logits, wide, i + k) : -__builtin_inff();
    return load(all);
}

// Scores of logits: sigmoid, or softmax, with the largest logit and the sum over all experts.
struct Scores {
    bool sigmoids;
    F32 most, total;

    F32 of(F32 logits) const { return sigmoids ? sigmoid(logits) : div(exp(sub(logits, most)), total); }
};

// Routes one row, see RouterRule. If scores are undefined (NaN, or infinity in a softmax) all weights are NaN.
void route_row(const void* logits, bool wide, const RouterRule& rule, float* keys, int32_t* ids, float* weights) {
    const int experts = rule.experts;
    float most = -__builtin_inff();
    bool defined = true;
    for (int i = 0; i < experts; ++i) {
        const float x = logit(logits, wide, i);
        most = x > most ? x : most, defined = defined && x == x;
    }
    const bool sigmoids = rule.score == PROA_SCORE_SIGMOID;
    Scores scores{sigmoids, set(most), zero()};
    for (int i = 0; !sigmoids && i < experts; i += 16)
        scores.total = add(scores.total, exp(sub(load_logits(logits, wide, i, experts - i), set(most))));
    if (!sigmoids) defined = defined && most - most == 0, scores.total = set(reduce_add(scores.total));
    const bool by_logits = !sigmoids && !rule.correction && rule.best_of == 1;  // the softmax has the same order
    for (int i = 0; i < experts; i += 16) {
        F32 key = load_logits(logits, wide, i, experts - i);
        if (!by_logits) key = scores.of(key);
        if (rule.correction) {
            const int n = experts - i;
            key = add(key, n >= 16 ? load(rule.correction + i) : load_first(rule.correction + i, n, 0.f));
        }
        store(keys + i, key);
    }
    for (int i = 0; i < experts; ++i) defined = defined && keys[i] == keys[i];
    if (rule.groups > 1) leave_groups_out(keys, rule);
    choose(keys, experts, rule.top_k, ids, weights);
    float chosen = 0;
    for (int k = 0; k < rule.top_k; ++k) {
        float lanes[16];
        store(lanes, scores.of(set(logit(logits, wide, ids[k]))));
        weights[k] = lanes[0], chosen += lanes[0];
    }
    chosen += rule.epsilon;
    const float divisor = !rule.renormalise ? 1.f : chosen < rule.least ? rule.least : chosen;
    for (int k = 0; k < rule.top_k; ++k) weights[k] = defined ? weights[k] / divisor * rule.scale : __builtin_nanf("");
}
