// Attention over blocks of keys with online softmax: after every block a query row has the running maximum of its
// scores, the sum of exponentials relative to it, and the weighted sum of values. Never: pages, tasks.
//
// Two algorithms. A few rows (decode) read keys and values in place, 32 dimensions at a time: a row's state is
// [16 + lines * 32] floats: maximum and sum first, then for each line its even and its odd dimensions. Many rows
// (prompts) pack keys and values into panels like weights and multiply those (see panels.h); panels 2i and 2i + 1 of
// the values are the even and odd dimensions of line i.
#pragma once

constexpr int kAttendRows = kMostPlain >= 12 ? 4 : 2;  // rows at once: their sums and a key must fit into the registers
constexpr int kAttendLines = kMostPlain >= 12 ? 2 : 1;  // lines of values at once, likewise
constexpr int kQueryLine = kBf16Dot ? 16 : 32;          // floats per 32 values of a packed query

inline U32 high_halves(U32 x) { return bit_and(x, set_u32(0xffff0000)); }

// The first dimension of a line of 32. The last line overlaps its neighbour instead of exceeding the row.
inline int line_begin(int line, int dim) { return 32 * line + 32 <= dim ? 32 * line : dim - 32; }
inline U32 load_short(const uint16_t* row, int dim) {
    uint16_t all[32] = {};
    for (int i = 0; i < dim; ++i) all[i] = row[i];
    return load_u32(all);
}
inline U32 load_line(const uint16_t* row, int line, int dim) {
    return dim >= 32 ? load_u32(row + line_begin(line, dim)) : load_short(row, dim);
}

inline void load_query(const float* line, U32& out) { out = load_u32(line); }
template <class B>
inline void load_query(const float* line, B& out) {
    out = {load(line), load(line + 16)};
}

// Packs a query into lines for attend(); dimensions that two lines share are zero in the second.
void pack_query(const uint16_t* query, int dim, float* out) {
    for (int line = 0; line < attention_lines(dim); ++line, out += kQueryLine) {
        U32 bits = load_line(query, line, dim);
        if (dim > 32 && dim < 32 * line + 32) {
            uint16_t all[32];
            store_u32(all, bits);
            for (int i = 0; i < 32 * line - line_begin(line, dim); ++i) all[i] = 0;
            bits = load_u32(all);
        }
        if (kBf16Dot) {
            store_u32(out, bits);
        } else {
            store(out, as_f32(shl<16>(bits))), store(out + 16, as_f32(high_halves(bits)));
        }
    }
}

alignas(64) constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr uint16_t kNoKey[kMostHeadDim] = {};

// Replaces lanes outside [first, last) by `other`.
inline F32 only(F32 x, int first, int last, float other) {
    if (first <= 0 && last >= 16) return x;
    const F32 numbers = load(kLaneNumbers);
    x = select_greater(set(float(first)), numbers, set(other), x);
    return select_greater(set(float(last)), numbers, x, set(other));
}

inline void prefetch(const uint16_t* row, int dim) {
    for (int i = 0; i < dim; i += 32) __builtin_prefetch(row + i);
}

// Scores of R rows of one head and the 4 / R tokens from `token` on.
template <int R>
inline void score_rows(const AttendBlock& b, int head, int row, int token) {
    constexpr int T = 4 / R;
    const int lines = attention_lines(b.key_dim), stride = lines * kQueryLine;
    const float* queries = b.queries + size_t(head * b.rows + row) * stride;
    const uint16_t* keys[T];
    for (int t = 0; t < T; ++t) keys[t] = b.keys[token + t] + head * b.key_dim;
    F32 sum[4] = {zero(), zero(), zero(), zero()};
    const auto add_line = [&](int line, auto&& load_key) {
        Pair pairs[T];
        for (int t = 0; t < T; ++t) pairs[t] = from_bf16_pairs(load_key(keys[t]));
        for (int r = 0; r < R; ++r) {
            Broadcast query;
            load_query(queries + r * stride + line * kQueryLine, query);
            for (int t = 0; t < T; ++t) sum[r * T + t] = dot(sum[r * T + t], pairs[t], query);
        }
    };
    for (int line = 0; line < b.key_dim / 32; ++line)
        add_line(line, [&](const uint16_t* key) { return load_u32(key + 32 * line); });
    if (b.key_dim % 32) add_line(lines - 1, [&](const uint16_t* key) { return load_line(key, lines - 1, b.key_dim); });
    float sums[4];
    reduce_add4(sum[0], sum[1], sum[2], sum[3], sums);
    float* scores = b.scores + size_t(head * b.rows + row) * kAttendTokens + token;
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) scores[r * kAttendTokens + t] = sums[r * T + t];
}

// Turns scores into weights relative to the new maximum; returns the factor for the previous sums.
inline float weigh(const AttendBlock& b, int row, float* scores, float* state) {
    const int first = b.first[row], last = b.last[row];
    if (first >= last) {
        for (int i = 0; i < kAttendTokens; i += 16) store(scores + i, zero());
        return 1.f;
    }
    F32 most = set(state[0]);
    for (int i = 0; i < kAttendTokens; i += 16) {
        const F32 s = only(mul(load(scores + i), set(b.scale)), first - i, last - i, -__builtin_inff());
        store(scores + i, s);
        most = max(most, s);
    }
    const float maximum = reduce_max(most);
    float factor[16];
    store(factor, exp(set(state[0] - maximum)));
    F32 sum = zero();
    for (int i = 0; i < kAttendTokens; i += 16) {
        const F32 p = exp(sub(load(scores + i), set(maximum)));
        store(scores + i, p);
        sum = add(sum, p);
    }
    state[0] = maximum;
    state[1] = state[1] * factor[0] + reduce_add(sum);
    return factor[0];
}

// Accumulates `L` lines from `line` on for R rows, with their sums in registers.
template <int R, int L, class Load>
inline void add_lines(const AttendBlock& b, const float* weights, const float* factors, float* states, int line,
                      Load&& load_value) {
    const int stride = attention_state_floats(b.value_dim);
    F32 sums[R][2 * L];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * L; ++i)
            sums[r][i] = mul(load(states + r * stride + 16 + 32 * line + 16 * i), set(factors[r]));
    for (int j = 0; j < b.tokens; ++j) {
        F32 values[2 * L];
        for (int l = 0; l < L; ++l) {
            const U32 bits = load_value(b.values[j], l);
            values[2 * l] = as_f32(shl<16>(bits)), values[2 * l + 1] = as_f32(high_halves(bits));
        }
        for (int r = 0; r < R; ++r) {
            const F32 weight = set(weights[r * kAttendTokens + j]);
            for (int i = 0; i < 2 * L; ++i) sums[r][i] = fma(weight, values[i], sums[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * L; ++i) store(states + r * stride + 16 + 32 * line + 16 * i, sums[r][i]);
}

template <int R>
void add_values(const AttendBlock& b, int head, const float* weights, const float* factors, float* states) {
    const int whole = b.value_dim / 32, begin = head * b.value_dim;
    int line = 0;
    for (; line + kAttendLines <= whole; line += kAttendLines)
        add_lines<R, kAttendLines>(b, weights, factors, states, line,
                                   [&](const uint16_t* row, int l) { return load_u32(row + begin + 32 * (line + l)); });
    for (; line < attention_lines(b.value_dim); ++line)
        add_lines<R, 1>(b, weights, factors, states, line,
                        [&](const uint16_t* row, int) { return load_line(row + begin, line, b.value_dim); });
}

template <int R>
inline void attend_rows(const AttendBlock& b, int head, int row) {
    float* scores = b.scores + size_t(head * b.rows + row) * kAttendTokens;
    float* states = b.states + size_t(head * b.rows + row) * attention_state_floats(b.value_dim);
    float factors[R];
    for (int r = 0; r < R; ++r)
        factors[r] = weigh(b, row + r, scores + r * kAttendTokens, states + r * attention_state_floats(b.value_dim));
    add_values<R>(b, head, scores, factors, states);
}

// Reads keys and prefetches values in memory order, all heads of a token before the next token: hardware prefetchers
// follow that order, and without them a core cannot keep enough lines in flight.
void attend(const AttendBlock& b) {
    for (int token = 0; token < b.tokens; token += 4)
        for (int t = token; t < token + 4; ++t)
            for (int head = 0; head < b.heads; ++head) {
                prefetch(b.keys[t + b.ahead] + head * b.key_dim, b.key_dim);
                prefetch(b.values[t + b.ahead] + head * b.value_dim, b.value_dim);
                int row = 0;
                if (t % (4 / kAttendRows) == 0)
                    for (; row + kAttendRows <= b.rows; row += kAttendRows) score_rows<kAttendRows>(b, head, row, t);
                row = b.rows / kAttendRows * kAttendRows;
                if (t == token)
                    for (; row < b.rows; ++row) score_rows<1>(b, head, row, t);
            }
    for (int head = 0; head < b.heads; ++head) {
        int row = 0;
        for (; row + kAttendRows <= b.rows; row += kAttendRows) attend_rows<kAttendRows>(b, head, row);
        for (; row < b.rows; ++row) attend_rows<1>(b, head, row);
    }
}

// Merges the states of several parts, in their order.
void merge_states(const float* parts, size_t stride, int count, int value_dim, float* state) {
    const int floats = attention_state_floats(value_dim);
    float maximum = parts[0];
    for (int i = 1; i < count; ++i) maximum = parts[i * stride] > maximum ? parts[i * stride] : maximum;
    state[0] = maximum, state[1] = 0;
    for (int at = 16; at < floats; at += 16) store(state + at, zero());
    for (int i = 0; i < count; ++i) {
        const float* part = parts + i * stride;
        if (part[1] == 0) continue;  // the part had no visible key
        float factor[16];
        store(factor, exp(set(part[0] - maximum)));
        state[1] += factor[0] * part[1];
        for (int at = 16; at < floats; at += 16)
            store(state + at, fma(load(part + at), set(factor[0]), load(state + at)));
    }
}

// Writes a row of the output, times `scale`. sink: one more score, without a value; minus infinity: none.
void finish_state(const float* state, float sink, float scale, int value_dim, uint16_t* out) {
    const float maximum = sink > state[0] ? sink : state[0];
    float factor[16], sunk[16];
    store(factor, exp(set(state[0] - maximum))), store(sunk, exp(set(sink - maximum)));
    const float sum = state[1] * factor[0] + sunk[0];
    const F32 times = set(sum > 0 ? scale * factor[0] / sum : sum);
    for (int line = 0; line < attention_lines(value_dim); ++line) {
        const U32 even = bf16_bits(mul(load(state + 16 + 32 * line), times));
        const U32 both = bit_or(even, shl<16>(bf16_bits(mul(load(state + 32 + 32 * line), times))));
        if (value_dim >= 32) {
            store_u32(out + line_begin(line, value_dim), both);
            continue;
        }
        uint16_t all[32];
        store_u32(all, both);
        for (int i = 0; i < value_dim; ++i) out[i] = all[i];
    }
}

// ---- panels

typedef uint32_t Quad __attribute__((vector_size(16)));

// Four 32-bit elements, each a pair of columns.
inline Quad load_quad(const void* p) {
    Quad x;
    __builtin_memcpy(&x, p, 16);
    return x;
}

// Loads the first `count` of eight values and reads nothing beyond them.
inline Quad load_first_of_eight(const uint16_t* p, int count) {
    uint16_t all[8] = {};
    for (int i = 0; i < count; ++i) all[i] = p[i];
    return load_quad(all);
}

// {a0 b0 a1 b1}, {a2 b2 a3 b3}; {a0 a1 b0 b1}, {a2 a3 b2 b3}.
#if defined(__clang__)
inline Quad zip_low(Quad a, Quad b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Quad zip_high(Quad a, Quad b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
inline Quad join_low(Quad a, Quad b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
inline Quad join_high(Quad a, Quad b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
#else
inline Quad zip_low(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{0, 4, 1, 5}); }
inline Quad zip_high(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{2, 6, 3, 7}); }
inline Quad join_low(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{0, 1, 4, 5}); }
inline Quad join_high(Quad a, Quad b) { return __builtin_shuffle(a, b, Quad{2, 3, 6, 7}); }
#endif

// Stores column i of the four rows at out + i * 64.
inline void store_transposed(Quad a, Quad b, Quad c, Quad d, uint8_t* out) {
    const Quad ab = zip_low(a, b), cd = zip_low(c, d), ab2 = zip_high(a, b), cd2 = zip_high(c, d);
    const Quad columns[4] = {join_low(ab, cd), join_high(ab, cd), join_low(ab2, cd2), join_high(ab2, cd2)};
    for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * 64, &columns[i], 16);
}

// Packs keys into panels of 16, padded with zeros, in the layout layout_of(kBf16, keys, dim).
void pack_keys(const uint16_t* const* keys, size_t offset, int tokens, int dim, uint8_t* out) {
    const int padded = round_up(dim, kColumnUnit), whole = dim / 8 * 8;
    for (int first = 0; first < tokens; first += 16, out += size_t(padded) * 32) {
        for (int quad = 0; quad < 16; quad += 4) {
            const uint16_t* row[4];
            for (int i = 0; i < 4; ++i) row[i] = first + quad + i < tokens ? keys[first + quad + i] + offset : kNoKey;
            const auto store_eight = [&](int d, auto&& load) {
                store_transposed(load(row[0] + d), load(row[1] + d), load(row[2] + d), load(row[3] + d),
                                 out + d * 32 + quad * 4);
            };
            for (int d = 0; d < whole; d += 8) store_eight(d, load_quad);
            if (whole < dim)
                store_eight(whole, [&](const uint16_t* from) { return load_first_of_eight(from, dim - whole); });
        }
        for (int d = round_up(dim, 8); d < padded; d += 2) store_u32(out + d * 32, set_u32(0));
    }
}

// Packs values into panels of 16 dimensions times `padded` tokens, zero beyond `tokens`.
void pack_values(const uint16_t* const* values, size_t offset, int tokens, int dim, int padded, uint8_t* out) {
    for (int line = 0; line < attention_lines(dim); ++line, out += size_t(padded) * 64) {
        uint8_t* odd = out + size_t(padded) * 32;
        for (int j = 0; j < padded; j += 2) {
            const U32 a = j < tokens ? load_line(values[j] + offset, line, dim) : set_u32(0);
            const U32 b = j + 1 < tokens ? load_line(values[j + 1] + offset, line, dim) : set_u32(0);
            store_u32(out + j * 32, bit_or(bit_and(a, set_u32(0xffff)), shl<16>(b)));
            store_u32(odd + j * 32, bit_or(shr<16>(a), high_halves(b)));
        }
    }
}

// Turns the scores of one row over all panels of the tile into weights, rounded to bfloat16 like the product's input.
inline void weigh_row(const SoftmaxTile& t, int row) {
    const int first = t.first[row], last = t.last[row];
    const size_t stride = size_t(t.rows) * 16;
    float* scores = t.scores + size_t(row) * 16;
    if (first >= last) {
        for (int i = 0; i < t.panels; ++i) store(scores + i * stride, zero());
        t.factors[row] = 1.f;
        return;
    }
    F32 most = set(t.maxima[row]);
    for (int i = 0; i < t.panels; ++i) {
        const F32 s = mul(load(scores + i * stride), set(t.scale));
        most = max(most, only(s, first - 16 * i, last - 16 * i, -__builtin_inff()));
    }
    const float maximum = reduce_max(most);
    F32 sum = zero();
    for (int i = 0; i < t.panels; ++i) {
        const F32 s =
            only(mul(load(scores + i * stride), set(t.scale)), first - 16 * i, last - 16 * i, -__builtin_inff());
        const F32 p = rounded_to_bf16(exp(sub(s, set(maximum))));
        store(scores + i * stride, p);
        sum = add(sum, p);
    }
    float factor[16];
    store(factor, exp(set(t.maxima[row] - maximum)));
    t.maxima[row] = maximum;
    t.sums[row] = t.sums[row] * factor[0] + reduce_add(sum);
    t.factors[row] = factor[0];
}

void softmax_tile(const SoftmaxTile& t) {
    for (int row = 0; row < t.rows; ++row) weigh_row(t, row);
}

// total [panels][rows][16] = total * factors[row] + part.
void scale_and_add(const float* part, const float* factors, int panels, int rows, float* total) {
    for (int panel = 0; panel < panels; ++panel)
        for (int row = 0; row < rows; ++row) {
            const size_t at = (size_t(panel) * rows + row) * 16;
            store(total + at, fma(load(total + at), set(factors[row]), load(part + at)));
        }
}
