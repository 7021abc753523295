#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "error.h"

namespace proa {
namespace {

constexpr int kBlockRows = 16;     // rows per task of the convolution
constexpr int kSliceColumns = 64;  // columns of a state that stay in a core's first-level cache from row to row

using Share = DeltaShare;

bool is_fresh(const Share& s) { return s.q_len >= s.kv_len; }
const uint16_t* row_of(const ConstRows& rows, int row) { return rows.data + int64_t(row) * rows.stride; }
float bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// Address of a row's values of `width` channels from `channel` on in the convolution's output, which is stored
// [channel part][row][width], since the recurrence walks the rows of a head.
float* mixed_at(const GatedDelta& op, int channel, int width, int row) {
    return op.mixed + int64_t(channel) * op.now.rows.get() + int64_t(row) * width;
}

// A part of a group's channels: where to read it, and which channels it has.
struct Segment {
    const ConstRows* rows;
    int offset, channel, width;  // offset: in the rows
};

Segment segment_of(const GatedDelta& op, int part, int group) {
    const DeltaShape& s = op.shape;
    if (part == 2) return {&op.v, group * op.apart, 2 * s.groups * s.key_dim + group * s.values(), s.values()};
    return {part ? &op.k : &op.q, group * op.apart, (part * s.groups + group) * s.key_dim, s.key_dim};
}

uint16_t* tail_of(const GatedDelta& op, int slot) {
    const int64_t values = int64_t(op.shape.taps - 1) * op.shape.channels();
    return op.tail + int64_t(std::clamp(slot, 0, op.slots - 1)) * values;
}
float* rule_of(const GatedDelta& op, int slot, int head) {
    const int64_t values = int64_t(op.shape.key_dim) * op.shape.value_dim;
    return op.rule + (int64_t(std::clamp(slot, 0, op.slots - 1)) * op.shape.heads() + head) * values;
}

// A share, safe for a late task that reads it while it is replaced: its rows are clamped to the step's.
Share share_at(const GatedDelta& op, int i) {
    Share s = op.now.shares[size_t(i)];
    const int rows = op.now.rows.get();
    s.first_row = std::clamp(s.first_row, 0, rows);
    s.q_len = std::clamp(s.q_len, 0, rows - s.first_row);
    return s;
}

// The sequence that a row belongs to.
int sequence_at(const GatedDelta& op, int row) {
    int low = 0, high = std::min(op.now.sequences.get(), int(op.now.shares.size()));
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (op.now.shares[size_t(middle)].first_row <= row ? low : high) = middle;
    }
    return low;
}

// ---- the convolution: tasks of some rows and one group

struct Block {
    int group, first, end;
};

Block block_of(const GatedDelta& op, int task) {
    const int first = task / op.shape.groups * kBlockRows, rows = op.now.rows.get();
    return {task % op.shape.groups, std::min(first, rows), std::min(first + kBlockRows, rows)};
}

void convolve_row(const GatedDelta& op, const Kernels& k, const Share& share, int row, int group, float* out) {
    const DeltaShape& shape = op.shape;
    const int past = shape.taps - 1, index = std::clamp(row - share.first_row, 0, std::max(0, share.q_len - 1));
    const int first = is_fresh(share) ? std::max(0, past - index) : 0;  // at earlier taps, the inputs are zeros
    for (int part = 0; part < 3; ++part) {
        const Segment segment = segment_of(op, part, group);
        const uint16_t* seen[kMostTaps];
        for (int t = first; t < shape.taps; ++t) {
            const int from = index - past + t;
            seen[t] = from < 0 ? tail_of(op, share.slot) + int64_t(past + from) * shape.channels() + segment.channel
                               : row_of(*segment.rows, share.first_row + from) + segment.offset;
        }
        const size_t stride = size_t(shape.channels());
        const float* taps = op.conv + size_t(first) * stride + size_t(segment.channel);
        k.convolve(seen + first, taps, stride, shape.taps - first, segment.width, out);
        if (part < 2) k.scale_to(out, segment.width, part ? 1.f : 1.f / std::sqrt(float(shape.key_dim)));
        out += segment.width;
    }
}

void convolve_block(const void* context, int task, std::byte* scratch) {
    const GatedDelta& op = *static_cast<const GatedDelta*>(context);
    const Block block = block_of(op, task);
    float* out = reinterpret_cast<float*>(scratch);
    int s = sequence_at(op, block.first);
    for (int row = block.first; row < block.end; ++row, out += op.shape.group_channels()) {
        Share share = share_at(op, s);
        while (row >= share.first_row + share.q_len && s + 1 < op.now.sequences.get()) share = share_at(op, ++s);
        convolve_row(op, *op.now.kernels.get(), share, row, block.group, out);
    }
}

void place_block(const void* context, int task, const std::byte* scratch) {
    const GatedDelta& op = *static_cast<const GatedDelta*>(context);
    const Block block = block_of(op, task);
    const float* from = reinterpret_cast<const float*>(scratch);
    for (int row = block.first; row < block.end; ++row)
        for (int part = 0; part < 3; ++part) {
            const Segment segment = segment_of(op, part, block.group);
            std::memcpy(mixed_at(op, segment.channel, segment.width, row), from, size_t(segment.width) * sizeof(float));
            from += segment.width;
        }
}

// ---- the rule: tasks of one sequence and one head

struct Rule {
    uint16_t* out;                               // [rows][value_dim]
    float *state, *slice, *seen, *decay, *beta;  // [key_dim][value_dim]; of some columns; [rows][value_dim]; [rows]

    Rule(const DeltaShape& shape, int rows, Carver& scratch) {
        const size_t keys = size_t(shape.key_dim), values = size_t(shape.value_dim), count = size_t(rows);
        out = scratch.take<uint16_t>(count * values);
        state = scratch.take<float>(keys * values), slice = scratch.take<float>(keys * kSliceColumns);
        seen = scratch.take<float>(count * values);
        decay = scratch.take<float>(count), beta = scratch.take<float>(count);
    }
};

// log(1 + e^x).
double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }

void compute_gates(const GatedDelta& op, const Share& share, int head, const Rule& r) {
    const int gate = head / op.shape.per_group * op.gates_apart + head % op.shape.per_group;
    const double rate = std::exp(double(op.a_log[head]));
    for (int i = 0; i < share.q_len; ++i) {
        const float a = bf16(row_of(op.a, share.first_row + i)[gate]),
                    b = bf16(row_of(op.b, share.first_row + i)[gate]);
        r.decay[i] = float(std::exp(-rate * softplus(double(a) + double(op.dt_bias[head]))));
        r.beta[i] = float(1 / (1 + std::exp(-double(b))));
    }
}

// Applies all rows to some columns of a head's state.
void apply_slice(const GatedDelta& op, const Share& share, int head, int column, const Rule& r) {
    const DeltaShape& shape = op.shape;
    const Kernels& k = *op.now.kernels.get();
    const int group = head / shape.per_group, columns = std::min(kSliceColumns, shape.value_dim - column);
    const bool alone = share.q_len == 1;  // then a slice would only be a copy
    float* to = alone ? r.state + column : r.slice;
    const size_t to_stride = size_t(alone ? shape.value_dim : columns);
    const float* from = rule_of(op, share.slot, head) + column;
    size_t from_stride = size_t(shape.value_dim);
    if (is_fresh(share)) {
        for (int i = 0; i < shape.key_dim; ++i)
            std::memset(to + size_t(i) * to_stride, 0, size_t(columns) * sizeof(float));
        from = to, from_stride = to_stride;
    }
    for (int i = 0; i < share.q_len; ++i, from = to, from_stride = to_stride) {
        const int row = share.first_row + i, query = group * shape.key_dim;
        const int value = 2 * shape.groups * shape.key_dim + group * shape.values();
        k.delta_step({from, from_stride, to, to_stride,
                      mixed_at(op, shape.groups * shape.key_dim + query, shape.key_dim, row),
                      mixed_at(op, query, shape.key_dim, row),
                      mixed_at(op, value, shape.values(), row) + head % shape.per_group * shape.value_dim + column,
                      r.decay[i], r.beta[i], shape.key_dim, columns, r.seen + int64_t(i) * shape.value_dim + column});
    }
    for (int i = 0; i < shape.key_dim && !alone; ++i)
        std::memcpy(r.state + int64_t(i) * shape.value_dim + column, r.slice + i * columns,
                    size_t(columns) * sizeof(float));
}

void apply(const void* context, int task, std::byte* memory) {
    const GatedDelta& op = *static_cast<const GatedDelta*>(context);
    const DeltaShape& shape = op.shape;
    const int head = task % shape.heads(), group = head / shape.per_group, member = head % shape.per_group;
    const Share share = share_at(op, task / shape.heads());
    Carver scratch(memory);
    const Rule r(shape, share.q_len, scratch);
    compute_gates(op, share, head, r);
    for (int column = 0; column < shape.value_dim; column += kSliceColumns) apply_slice(op, share, head, column, r);
    for (int i = 0; i < share.q_len; ++i) {
        const uint16_t* z = row_of(op.z, share.first_row + i) + group * op.apart + member * shape.value_dim;
        const int64_t at = int64_t(i) * shape.value_dim;
        op.now.kernels.get()->gated_norm_row(r.seen + at, op.norm, z, shape.value_dim, op.eps, r.out + at);
    }
}

// Stores the last input rows, which the next token's convolution needs, for this head's channels.
void keep_tail(const GatedDelta& op, const Share& share, int part, int group, int skip, int width) {
    const Segment segment = segment_of(op, part, group);
    const int past = op.shape.taps - 1;
    uint16_t* tail = tail_of(op, share.slot) + segment.channel + skip;
    for (int j = 0; j < past; ++j, tail += op.shape.channels()) {
        const int from = share.q_len - past + j;
        const size_t bytes = size_t(width) * sizeof(uint16_t);
        if (from >= 0)
            std::memcpy(tail, row_of(*segment.rows, share.first_row + from) + segment.offset + skip, bytes);
        else if (is_fresh(share))
            std::memset(tail, 0, bytes);
        else
            std::memcpy(tail, tail + int64_t(share.q_len) * op.shape.channels(), bytes);
    }
}

void place_rule(const void* context, int task, const std::byte* memory) {
    const GatedDelta& op = *static_cast<const GatedDelta*>(context);
    const DeltaShape& shape = op.shape;
    const int head = task % shape.heads(), group = head / shape.per_group, member = head % shape.per_group;
    const Share share = share_at(op, task / shape.heads());
    if (share.q_len == 0) return;
    Carver scratch(const_cast<std::byte*>(memory));
    const Rule r(shape, share.q_len, scratch);
    for (int i = 0; i < share.q_len; ++i)
        std::memcpy(op.out.data + (share.first_row + i) * op.out.stride + head * shape.value_dim,
                    r.out + int64_t(i) * shape.value_dim, size_t(shape.value_dim) * sizeof(uint16_t));
    std::memcpy(rule_of(op, share.slot, head), r.state,
                size_t(shape.key_dim) * size_t(shape.value_dim) * sizeof(float));
    keep_tail(op, share, 2, group, member * shape.value_dim, shape.value_dim);
    for (int part = 0; part < 2 && member == 0; ++part) keep_tail(op, share, part, group, 0, shape.key_dim);
}

void divide(const GatedDelta& op) {
    int row = 0;
    for (int i = 0; i < op.batch->sequences(); ++i) {
        op.now.shares[size_t(i)] = {row, op.batch->q_len(i), op.batch->kv_len(i), op.batch->state(i)};
        row += op.batch->q_len(i);
        if (op.batch->state(i) < 0 || op.batch->state(i) >= op.slots)
            throw Error(PROA_ERROR_ARGUMENT, "State slot " + std::to_string(op.batch->state(i)) + " of sequence " +
                                                 std::to_string(i) + " does not exist: there are " +
                                                 std::to_string(op.slots) + " slots.");
    }
}

bool is_size(int64_t size, int64_t most) { return size >= 1 && size <= most; }

}  // namespace

void check(const GatedDelta& op) {
    const DeltaShape& s = op.shape;
    require(is_size(s.groups, 4096) && is_size(s.per_group, 4096) && is_size(s.key_dim, 4096) &&
                is_size(s.value_dim, 4096) && int64_t(s.groups) * (2 * s.key_dim + int64_t(s.values())) <= 1 << 24,
            "Groups, heads per group and dimensions of the delta rule must be 1 to 4096, with at most 2^24 channels.");
    require(s.value_dim % 16 == 0, "The dimension of a value must be a multiple of 16.");
    require(s.taps >= 2 && s.taps <= kMostTaps, "A convolution must have 2 to 8 taps.");
    require(is_size(op.slots, 1 << 24), "The number of state slots must be between 1 and 2^24.");
    require(op.apart >= std::max(s.key_dim, s.values()) && op.gates_apart >= s.per_group,
            "Groups of a row overlap: a stride between groups is less than a group.");
    const int64_t before = int64_t(s.groups - 1) * op.apart;
    for (const ConstRows* rows : {&op.q, &op.k}) check_rows(rows->data, rows->stride, before + s.key_dim, "the keys");
    for (const ConstRows* rows : {&op.v, &op.z})
        check_rows(rows->data, rows->stride, before + s.values(), "the values");
    for (const ConstRows* rows : {&op.b, &op.a})
        check_rows(rows->data, rows->stride, int64_t(s.groups - 1) * op.gates_apart + s.per_group, "the gates");
    require(op.conv && op.a_log && op.dt_bias && op.norm && op.rule && op.tail && op.batch && op.mixed,
            "An input of the delta rule is a null pointer.");
    check_rows(op.out.data, op.out.stride, int64_t(s.heads()) * s.value_dim, "the output of the delta rule");
}

void run(const GatedDelta& op, Host& host, int rows, int lane) {
    require(rows == op.batch->rows(), "The step and its batch differ in their number of rows.");
    if (rows == 0) return;
    Carver scratch;
    const Rule measured(op.shape, rows, scratch);
    require(scratch.used() <= kScratchBytes, "The step has too many rows for the delta rule.");
    if (int(op.now.shares.size()) != op.batch->most_sequences()) {
        host.pool.settle();
        op.now.shares.assign(size_t(op.batch->most_sequences()), {});
    }
    divide(op);
    op.now.kernels.set(host.kernels), op.now.sequences.set(op.batch->sequences()), op.now.rows.set(rows);
    Phase phase = spread((rows + kBlockRows - 1) / kBlockRows * op.shape.groups, host.pool.nodes());
    phase.run = convolve_block, phase.publish = place_block, phase.context = &op;
    host.pool.run(phase, lane);
    phase = spread(op.batch->sequences() * op.shape.heads(), host.pool.nodes());
    phase.run = apply, phase.publish = place_rule, phase.context = &op;
    host.pool.run(phase, lane);
}

}  // namespace proa
