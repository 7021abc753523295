#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "error.h"
#include "subnormals.h"

namespace proa {
namespace {

constexpr size_t kAloneBytes = 128 << 10;  // of results: some microseconds, not worth waking workers
constexpr size_t kTaskBytes = 64 << 10;    // fits into any core's cache, with its inputs

template <class T>
T* row_of(T* data, int64_t stride, int row) {
    return data + int64_t(row) * stride;
}
uint16_t* row_of(const Rows& rows, int row) { return row_of(rows.data, rows.stride, row); }
const uint16_t* row_of(const ConstRows& rows, int row) { return row_of(rows.data, rows.stride, row); }

// Copies contiguous rows of `width` values to rows [first, last) of `to`.
void copy_rows(const uint16_t* from, int width, const Rows& to, int first, int last) {
    for (int row = first; row < last; ++row, from += width)
        std::memcpy(row_of(to, row), from, size_t(width) * sizeof(uint16_t));
}

// For each operation: bytes of a row of its results; compute(), which computes rows [first, last) into scratch;
// place(), which copies them to their destination. Operations that only copy do everything in place().

size_t row_bytes(const Embed& op) { return size_t(op.width) * 2; }
void compute(const Embed&, const Kernels&, int, int, std::byte*) {}
void place(const Embed& op, int first, int last, const std::byte*) {
    for (int row = first; row < last; ++row)
        std::memcpy(row_of(op.out, row), op.table + size_t(op.tokens[row]) * size_t(op.width), row_bytes(op));
}

size_t row_bytes(const RmsNorm& op) { return size_t(op.groups) * size_t(op.width) * 2; }
void compute(const RmsNorm& op, const Kernels& k, int first, int last, std::byte* scratch) {
    uint16_t* out = reinterpret_cast<uint16_t*>(scratch);
    const int apart = std::max(op.width, op.apart);
    for (int row = first; row < last; ++row)
        for (int g = 0; g < op.groups; ++g, out += op.width)
            k.rms_norm_row(row_of(op.x, row) + g * apart, op.weight, op.width, op.eps, op.offset, out);
}
void place(const RmsNorm& op, int first, int last, const std::byte* scratch) {
    copy_rows(reinterpret_cast<const uint16_t*>(scratch), op.groups * op.width, op.out, first, last);
}

size_t row_bytes(const Add& op) { return size_t(op.width) * 2; }
void compute(const Add& op, const Kernels& k, int first, int last, std::byte* scratch) {
    uint16_t* out = reinterpret_cast<uint16_t*>(scratch);
    for (int row = first; row < last; ++row, out += op.width)
        k.add_row(row_of(op.x, row), row_of(op.y, row), op.width, out);
}
void place(const Add& op, int first, int last, const std::byte* scratch) {
    copy_rows(reinterpret_cast<const uint16_t*>(scratch), op.width, op.x, first, last);
}

size_t row_bytes(const GatedAdd& op) { return size_t(op.width) * 2; }
void compute(const GatedAdd& op, const Kernels& k, int first, int last, std::byte* scratch) {
    uint16_t* out = reinterpret_cast<uint16_t*>(scratch);
    for (int row = first; row < last; ++row, out += op.width)
        k.gated_add_row(row_of(op.routed, row), *row_of(op.gate, row), row_of(op.shared, row), op.width, out);
}
void place(const GatedAdd& op, int first, int last, const std::byte* scratch) {
    copy_rows(reinterpret_cast<const uint16_t*>(scratch), op.width, op.out, first, last);
}

size_t row_bytes(const Gate& op) { return size_t(op.heads) * size_t(op.head_dim) * 2; }
void compute(const Gate& op, const Kernels& k, int first, int last, std::byte* scratch) {
    uint16_t* out = reinterpret_cast<uint16_t*>(scratch);
    for (int row = first; row < last; ++row)
        for (int head = 0; head < op.heads; ++head, out += op.head_dim)
            k.gate_row(row_of(op.x, row) + head * op.head_dim, row_of(op.gate, row) + head * op.apart, op.head_dim,
                       out);
}
void place(const Gate& op, int first, int last, const std::byte* scratch) {
    copy_rows(reinterpret_cast<const uint16_t*>(scratch), op.heads * op.head_dim, op.x, first, last);
}

size_t row_bytes(const Rotary& op) { return size_t(op.heads) * size_t(op.half) * 4; }
void compute(const Rotary& op, const Kernels& k, int first, int last, std::byte* scratch) {
    uint16_t* out = reinterpret_cast<uint16_t*>(scratch);
    for (int row = first; row < last; ++row)
        for (int head = 0; head < op.heads; ++head, out += 2 * op.half)
            k.rotate_head(row_of(op.x, row) + head * op.head_dim, row_of(op.cos, op.half, row),
                          row_of(op.sin, op.half, row), op.half, op.interleaved, out);
}
void place(const Rotary& op, int first, int last, const std::byte* scratch) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(scratch);
    for (int row = first; row < last; ++row)
        for (int head = 0; head < op.heads; ++head, from += 2 * op.half)
            std::memcpy(row_of(op.x, row) + head * op.head_dim, from, size_t(op.half) * 4);
}

size_t row_bytes(const WriteKv& op) {
    return size_t(op.cache.kv_heads) * size_t(op.cache.key_dim + op.cache.value_dim) * size_t(op.cache.elem_bytes());
}
void compute(const WriteKv& op, const Kernels& k, int first, int last, std::byte* scratch) {
    const KvPages& c = op.cache;
    if (c.type == KvType::kBf16) return;
    uint8_t* out = reinterpret_cast<uint8_t*>(scratch);
    for (int row = first; row < last; ++row, out += row_bytes(op)) {
        k.to_e4m3(row_of(op.keys, row), c.kv_heads * c.key_dim, 1 / c.key_scale, out);
        k.to_e4m3(row_of(op.values, row), c.kv_heads * c.value_dim, 1 / c.value_scale, out + c.kv_heads * c.key_dim);
    }
}
void place(const WriteKv& op, int first, int last, const std::byte* scratch) {
    const KvPages& c = op.cache;
    const int64_t elem = c.elem_bytes();
    const size_t key_bytes = size_t(c.kv_heads * c.key_dim * elem), value_bytes = row_bytes(op) - key_bytes;
    for (int row = first; row < last; ++row, scratch += row_bytes(op)) {
        const void *key = row_of(op.keys, row), *value = row_of(op.values, row);
        if (c.type == KvType::kE4m3) key = scratch, value = scratch + key_bytes;
        std::memcpy(static_cast<std::byte*>(c.keys) + op.slots[row] * c.key_stride * elem, key, key_bytes);
        std::memcpy(static_cast<std::byte*>(c.values) + op.slots[row] * c.value_stride * elem, value, value_bytes);
    }
}

// A task's scratch holds the ids and weights of its rows, then one row of keys. The size counts the keys twice, which
// makes tasks shorter: their time is spent on reading the logits.
size_t row_bytes(const Route& op) { return size_t(op.rule.top_k) * 8 + size_t(round_up(op.rule.experts, 16)) * 8; }
void compute(const Route& op, const Kernels& k, int first, int last, std::byte* scratch) {
    int32_t* ids = reinterpret_cast<int32_t*>(scratch);
    const size_t count = size_t(last - first) * size_t(op.rule.top_k);
    float* weights = reinterpret_cast<float*>(ids + count);
    float* keys = weights + count;
    const int64_t bytes = op.stride * (op.wide ? 4 : 2);
    for (int row = first; row < last; ++row, ids += op.rule.top_k, weights += op.rule.top_k)
        k.route_row(row_of(static_cast<const char*>(op.logits), bytes, row), op.wide, op.rule, keys, ids, weights);
}
void place(const Route& op, int first, int last, const std::byte* scratch) {
    const size_t count = size_t(last - first) * size_t(op.rule.top_k), begin = size_t(first) * size_t(op.rule.top_k);
    std::memcpy(op.ids + begin, scratch, count * sizeof(int32_t));
    std::memcpy(op.weights + begin, scratch + count * sizeof(int32_t), count * sizeof(float));
}

// Returns the largest of `count` values; `finite` becomes false if one is NaN or Inf. Written lane by lane, so that
// every compiler vectorises it.
float most_of(const float* x, int count, bool& finite) {
    constexpr int kLanes = 16;
    float most[kLanes], zeros[kLanes] = {};
    std::fill(most, most + kLanes, -std::numeric_limits<float>::infinity());
    for (int i = 0; i < count; i += kLanes) {
        const int lanes = std::min(kLanes, count - i);
        const auto take = [&](int n) {
            for (int l = 0; l < n; ++l) {
                most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
                zeros[l] += x[i + l] * 0.f;  // zero only for finite values
            }
        };
        if (lanes == kLanes)
            take(kLanes);
        else
            take(lanes);
    }
    for (float zero : zeros) finite = finite && zero == 0.f;
    return *std::max_element(most, most + kLanes);
}

int32_t best_of(const float* x, int width) {
    constexpr int kBlock = 1024;  // the argmax is searched for in one block
    bool finite = true;
    float best = -std::numeric_limits<float>::infinity();
    int block = 0;
    for (int first = 0; first < width; first += kBlock) {
        const float most = most_of(x + first, std::min(kBlock, width - first), finite);
        if (most > best) best = most, block = first;
    }
    return finite ? int32_t(std::find(x + block, x + width, best) - x) : -1;
}

size_t row_bytes(const Argmax& op) { return size_t(op.width) * sizeof(float); }  // bytes read: the result is one id
void compute(const Argmax& op, const Kernels&, int first, int last, std::byte* scratch) {
    int32_t* ids = reinterpret_cast<int32_t*>(scratch);
    for (int row = first; row < last; ++row) *ids++ = best_of(row_of(op.logits, op.stride, row), op.width);
}
void place(const Argmax& op, int first, int last, const std::byte* scratch) {
    std::memcpy(op.ids + first, scratch, size_t(last - first) * sizeof(int32_t));
}

// ---- tasks of every operation

template <class Op>
int task_rows(const Op& op) {
    return int(std::max<size_t>(1, kTaskBytes / std::max<size_t>(1, row_bytes(op))));
}

// The end of a task's rows. A late task may see the fewer rows of a later step.
template <class Op>
int end_of(const Op& op, int first) {
    return std::max(first, std::min(first + task_rows(op), op.now.rows.get()));
}

template <class Op>
void run_task(const void* context, int task, std::byte* scratch) {
    const Op& op = *static_cast<const Op*>(context);
    const int first = task * task_rows(op);
    compute(op, *op.now.kernels.get(), first, end_of(op, first), scratch);
}

template <class Op>
void publish_task(const void* context, int task, const std::byte* scratch) {
    const Op& op = *static_cast<const Op*>(context);
    const int first = task * task_rows(op);
    place(op, first, end_of(op, first), scratch);
}

template <class Op>
void run_rows(const Op& op, Host& host, int rows, int lane) {
    if (rows <= 0) return;
    const size_t bytes = size_t(rows) * row_bytes(op);
    if (bytes <= kAloneBytes || rows == 1) {
        [[maybe_unused]] const FlushSubnormals flush;
        std::byte* scratch = host.workspace(lane, bytes);
        compute(op, *host.kernels, 0, rows, scratch);
        return place(op, 0, rows, scratch);
    }
    op.now.kernels.set(host.kernels), op.now.rows.set(rows);
    Phase phase = spread(block_count(rows, task_rows(op)), host.pool.nodes());
    phase.run = run_task<Op>, phase.publish = publish_task<Op>, phase.context = &op;
    host.pool.run(phase, lane);
}

void check_range(const int64_t* values, int count, int64_t end, const char* what) {
    for (int i = 0; i < count; ++i)
        if (values[i] < 0 || values[i] >= end)
            throw Error(PROA_ERROR_ARGUMENT, std::string(what) + " " + std::to_string(values[i]) + " of row " +
                                                 std::to_string(i) + " does not exist: there are " +
                                                 std::to_string(end) + ".");
}

void check_size(int64_t size, int64_t most, const char* what) {
    if (size < 1 || size > most)
        throw Error(PROA_ERROR_ARGUMENT, std::string(what) + " must be 1 to " + std::to_string(most) + ", not " +
                                             std::to_string(size) + ".");
}
constexpr int64_t kMostWidth = 1 << 24, kMostHeads = 4096, kMostExperts = 1 << 20, kMostPages = (int64_t(1) << 31) - 1;

}  // namespace

void check_rows(const void* data, int64_t stride, int64_t width, const char* what) {
    if (!data) throw Error(PROA_ERROR_ARGUMENT, std::string("The pointer to ") + what + " is null.");
    if (stride < width)
        throw Error(PROA_ERROR_ARGUMENT, std::string("The stride of ") + what + " is " + std::to_string(stride) +
                                             " values, but rows have " + std::to_string(width) + ".");
}

void check(const Embed& op) {
    check_size(op.width, kMostWidth, "The width of an embedding");
    check_size(op.vocabulary, kMostPages, "The size of the vocabulary");
    require(op.tokens && op.table, "Token ids or their table are a null pointer.");
    check_rows(op.out.data, op.out.stride, op.width, "the output");
}

void check(const RmsNorm& op) {
    check_size(op.width, kMostWidth, "The width of a norm");
    check_size(op.groups, kMostHeads, "The number of groups of a norm");
    const int64_t width = int64_t(op.width) * op.groups;
    require(width <= kMostWidth, "The rows of a norm are too long.");
    require(op.weight, "The weight of a norm is a null pointer.");
    require(op.apart == 0 || op.apart >= op.width, "Groups of a norm's input overlap.");
    const int64_t reach = width + int64_t(op.groups - 1) * (op.apart ? op.apart - op.width : 0);
    check_rows(op.x.data, op.x.stride, reach, "the input of a norm");
    check_rows(op.out.data, op.out.stride, width, "the output of a norm");
}

void check(const Add& op) {
    check_size(op.width, kMostWidth, "The width of a sum");
    check_rows(op.x.data, op.x.stride, op.width, "the first summand");
    check_rows(op.y.data, op.y.stride, op.width, "the second summand");
}

void check(const GatedAdd& op) {
    check_size(op.width, kMostWidth, "The width of a sum");
    check_rows(op.routed.data, op.routed.stride, op.width, "the routed experts' output");
    check_rows(op.gate.data, op.gate.stride, 1, "the shared expert's gate");
    check_rows(op.shared.data, op.shared.stride, op.width, "the shared expert's output");
    check_rows(op.out.data, op.out.stride, op.width, "the output");
}

void check(const Gate& op) {
    check_size(op.heads, kMostHeads, "The number of heads");
    check_size(op.head_dim, kMostWidth / kMostHeads, "The dimension of a head");
    check_size(op.apart, kMostWidth / kMostHeads, "The distance between gates");
    require(op.apart >= op.head_dim, "Gates overlap: their distance is less than a head.");
    check_rows(op.x.data, op.x.stride, int64_t(op.heads) * op.head_dim, "the input of a gate");
    check_rows(op.gate.data, op.gate.stride, int64_t(op.heads - 1) * op.apart + op.head_dim, "the gate");
}

void check(const Rotary& op) {
    check_size(op.heads, kMostHeads, "The number of heads");
    check_size(op.head_dim, kMostWidth / kMostHeads, "The dimension of a head");
    check_size(op.half, op.head_dim / 2, "Half of the rotary dimensions");
    require(op.cos && op.sin, "The angles are a null pointer.");
    check_rows(op.x.data, op.x.stride, int64_t(op.heads) * op.head_dim, "the input of a rotary embedding");
}

void check(const KvPages& c) {
    check_size(c.pages, kMostPages, "The number of pages");
    check_size(c.page_tokens, 1 << 16, "The number of tokens per page");
    check_size(c.kv_heads, kMostHeads, "The number of KV heads");
    check_size(c.key_dim, kMostHeadDim, "The dimension of a key");
    check_size(c.value_dim, kMostHeadDim, "The dimension of a value");
    require(c.type == KvType::kBf16 || c.type == KvType::kE4m3, "A KV cache must be bfloat16 or e4m3.");
    require(std::isnormal(c.key_scale) && c.key_scale > 0 && std::isnormal(c.value_scale) && c.value_scale > 0,
            "Scales of a KV cache must be positive normal numbers.");
    require(c.type == KvType::kE4m3 || (c.key_scale == 1 && c.value_scale == 1), "Only a KV cache of e4m3 has scales.");
    require(c.key_dim % 2 == 0 && c.value_dim % 2 == 0, "Dimensions of keys and values must be even.");
    check_rows(c.keys, c.key_stride, int64_t(c.kv_heads) * c.key_dim, "the key cache");
    check_rows(c.values, c.value_stride, int64_t(c.kv_heads) * c.value_dim, "the value cache");
}

void check(const WriteKv& op) {
    check(op.cache);
    check_rows(op.keys.data, op.keys.stride, int64_t(op.cache.kv_heads) * op.cache.key_dim, "the keys");
    check_rows(op.values.data, op.values.stride, int64_t(op.cache.kv_heads) * op.cache.value_dim, "the values");
    require(op.slots, "The slots are a null pointer.");
}

void check(const Route& op) {
    const RouterRule& rule = op.rule;
    check_size(rule.experts, kMostExperts, "The number of experts");
    check_size(rule.top_k, rule.experts, "top_k");
    require(rule.score == PROA_SCORE_SOFTMAX || rule.score == PROA_SCORE_SIGMOID,
            "The score must be one of PROA_SCORE_*.");
    check_size(rule.groups, std::min(rule.experts, kMostExpertGroups), "The number of groups of experts");
    check_size(rule.kept, rule.groups, "The number of kept groups");
    const int size = rule.experts / rule.groups;
    require(size * rule.groups == rule.experts, "The number of experts must be a multiple of the number of groups.");
    check_size(rule.best_of, std::min(size, 2), "best_of");
    require(rule.top_k <= rule.kept * size, "The kept groups have fewer experts than top_k.");
    check_rows(op.logits, op.stride, rule.experts, "the logits");
    require(op.ids && op.weights, "Ids or weights are a null pointer.");
}

void check(const Argmax& op) {
    check_size(op.width, kMostWidth, "The number of logits");
    check_rows(op.logits, op.stride, op.width, "the logits");
    require(op.ids, "The output of ids is a null pointer.");
}

void run(const Embed& op, Host& host, int rows, int lane) {
    check_range(op.tokens, rows, op.vocabulary, "Token id");
    run_rows(op, host, rows, lane);
}
void run(const RmsNorm& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const Add& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const GatedAdd& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const Gate& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const Rotary& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const WriteKv& op, Host& host, int rows, int lane) {
    check_range(op.slots, rows, int64_t(op.cache.pages) * op.cache.page_tokens, "KV slot");
    run_rows(op, host, rows, lane);
}
void run(const Route& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }
void run(const Argmax& op, Host& host, int rows, int lane) { run_rows(op, host, rows, lane); }

}  // namespace proa
