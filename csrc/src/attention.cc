#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "error.h"
#include "subnormals.h"

namespace proa {
namespace {

constexpr int kPanelHeads = 16;  // from this many query heads on a single KV head, panels are always used
constexpr int kBlockRows = 128;  // query rows of one KV head per block
constexpr int kTileKeys = 128;   // keys in panels at once: they stay in the second-level cache with all their scores
constexpr int64_t kSplitBytes = 256 << 10;  // keys and values that one task reads: about ten microseconds
constexpr int64_t kAheadBytes = 4 << 10;    // distance of the prefetch, for keys and for values
constexpr int64_t kMostSplits = 256;        // per batch, about
constexpr int64_t kAloneBytes = 64 << 10;   // up to this much, the calling thread computes alone

using Share = AttentionShare;

int group_of(const Attention& op) { return op.heads / op.cache.kv_heads; }
float logit_scale(const Attention& op) { return op.scale * op.cache.key_scale; }
int block_queries(const Attention& op) { return std::max(1, kBlockRows / group_of(op)); }
// True if keys are read in place. Many heads on one KV head, as in latent attention, use panels from the first row on.
// Rows of a prompt always use panels, so that their bits do not depend on how many of them a step has.
bool reads_directly(const Attention& op, int q_len) {
    if (op.batch->regime() == Regime::kPrompt) return false;
    return q_len <= kDirectQueries && (op.cache.kv_heads > 1 || q_len * op.heads < kPanelHeads);
}
int first_seen(const Attention& op, int position) { return op.window > 0 ? std::max(0, position - op.window + 1) : 0; }
int keys_of(const Attention& op, const Share& s) { return s.kv_len - first_seen(op, s.kv_len - s.q_len); }
int64_t bytes_of(const Attention& op, const Share& s) {
    return int64_t(keys_of(op, s)) * op.cache.kv_heads * (op.cache.key_dim + op.cache.value_dim) *
           op.cache.elem_bytes();
}

struct Totals {
    int tasks = 0, states = 0, merges = 0;
    int64_t bytes = 0;
    bool panels = false;
};

// Splits the batch into tasks.
Totals divide(const Attention& op) {
    const AttentionBatch& batch = *op.batch;
    const Regime regime = batch.regime();
    std::vector<Share>& shares = op.now.shares;
    Totals total;
    int row = 0;
    for (int i = 0; i < batch.sequences(); ++i) {
        Share& s = shares[size_t(i)];
        s.first_row = row, s.q_len = batch.q_len(i), s.kv_len = batch.kv_len(i);
        s.blocks = (s.q_len + block_queries(op) - 1) / block_queries(op);
        s.direct = reads_directly(op, s.q_len), s.aligned = regime == Regime::kPrompt;
        row += s.q_len;
        if (s.direct) s.blocks = std::min(1, s.q_len);
        if (s.blocks == 1) total.bytes += bytes_of(op, s);
        total.panels = total.panels || !s.direct;
    }
    // In decode a sequence's splits depend only on its own length.
    const int64_t split_bytes =
        regime == Regime::kDecode ? kSplitBytes : std::max(kSplitBytes, total.bytes / kMostSplits);
    for (int i = 0; i < batch.sequences(); ++i) {
        Share& s = shares[size_t(i)];
        const int heads = s.direct ? 1 : op.cache.kv_heads;  // that have separate tasks
        const int64_t wanted = (bytes_of(op, s) + split_bytes * heads - 1) / (split_bytes * heads);
        const int most = (keys_of(op, s) + kAttendTokens - 1) / kAttendTokens;
        const bool splits = s.blocks == 1 && regime != Regime::kPrompt;
        s.splits = splits ? int(std::clamp<int64_t>(wanted, 1, most)) : 1;
        s.first_task = total.tasks, s.first_state = total.states, s.first_merge = total.merges;
        total.tasks += s.blocks * heads * s.splits;
        if (s.splits == 1) continue;
        total.states += s.splits * s.q_len * op.heads;
        total.merges += op.cache.kv_heads;
    }
    return total;
}

// The index of the last share whose member `first` is at most `at`.
int share_at(const Attention& op, int Share::* first, int at) {
    const std::vector<Share>& shares = op.now.shares;
    int low = 0, high = std::min(op.now.sequences.get(), int(shares.size()));
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (shares[size_t(middle)].*first <= at ? low : high) = middle;
    }
    return low;
}

// A task's work. A late task may read a share that the next step has overwritten in part, so each number is clamped to
// a safe range independently.
struct Piece {
    Share share;
    int sequence, first_query, queries;  // queries: within the sequence
    int first_head, heads;               // KV heads
    int split, first_key, end_key;
    int results() const { return heads * queries; }  // each with all query heads of the group
};

Piece piece_of(const Attention& op, int task) {
    Piece p{};
    p.sequence = share_at(op, &Share::first_task, task);
    const Share& s = p.share = op.now.shares[size_t(p.sequence)];
    int local = std::max(0, task - s.first_task);
    p.split = local % std::max(1, s.splits), local /= std::max(1, s.splits);
    p.heads = op.cache.kv_heads;
    int block = 0;
    if (!s.direct) {
        p.first_head = local % op.cache.kv_heads, p.heads = 1;
        block = std::max(0, s.blocks - 1 - local / op.cache.kv_heads);  // longest first
    }
    const int step = s.direct ? kDirectQueries : block_queries(op);
    p.first_query = block * step;
    p.queries = std::clamp(std::min(s.q_len, op.now.rows.get() - s.first_row) - p.first_query, 0, step);
    const int position = s.kv_len - s.q_len + p.first_query, seen = first_seen(op, position);
    // A row's rounding depends on where tiles of keys begin: for prompts they lie on a fixed grid, wherever the queries
    // begin.
    const int begin = s.aligned ? seen / kTileKeys * kTileKeys : seen;
    const int end = std::min(position + p.queries, op.batch->most_pages() * op.cache.page_tokens);
    const int64_t blocks = (end - begin + kAttendTokens - 1) / kAttendTokens, splits = std::max(1, s.splits);
    p.first_key = std::max(0, begin + int(blocks * p.split / splits) * kAttendTokens);
    p.end_key = std::min(end, begin + int(blocks * (p.split + 1) / splits) * kAttendTokens);
    return p;
}

// Writes pointers to the cached rows of `count` tokens from `first` on; a head is at its offset in these rows.
template <class T>
void look_up(const Attention& op, int sequence, int first, int count, const T** keys, const T** values) {
    const KvPages& c = op.cache;
    const int32_t* pages = op.batch->pages(sequence);
    int page = first / c.page_tokens, offset = first % c.page_tokens;
    for (int i = 0; i < count; ++i) {
        const int64_t token = int64_t(std::min(pages[page], c.pages - 1)) * c.page_tokens + offset;
        keys[i] = static_cast<const T*>(c.keys) + token * c.key_stride;
        values[i] = static_cast<const T*>(c.values) + token * c.value_stride;
        if (++offset == c.page_tokens) ++page, offset = 0;
    }
}

// look_up for an e4m3 cache: converts `heads` KV heads from `first_head` on to bfloat16, in rows of only these heads.
void widen(const Attention& op, const Kernels& k, int sequence, int first, int count, int first_head, int heads,
           uint16_t* wide, const uint16_t** keys, const uint16_t** values) {
    const int key_dim = op.cache.key_dim, value_dim = op.cache.value_dim;
    const uint8_t *key_codes[kTileKeys], *value_codes[kTileKeys];
    look_up(op, sequence, first, count, key_codes, value_codes);
    for (int i = 0; i < count; ++i) {
        keys[i] = wide;
        k.from_e4m3(key_codes[i] + first_head * key_dim, heads * key_dim, wide);
        wide += heads * key_dim, values[i] = wide;
        k.from_e4m3(value_codes[i] + first_head * value_dim, heads * value_dim, wide);
        wide += heads * value_dim;
    }
}

uint16_t* take_wide(const Attention& op, int tokens, int heads, Carver& scratch) {
    const KvPages& c = op.cache;
    if (c.type == KvType::kBf16) return nullptr;
    return scratch.take<uint16_t>(size_t(tokens) * size_t(heads) * size_t(c.key_dim + c.value_dim));
}

// Writes the range [first, last) of `count` keys from `begin` on that each query row sees.
void see(const Attention& op, const Piece& p, int begin, int count, int* first, int* last) {
    const int group = group_of(op);
    for (int t = 0; t < p.queries; ++t) {
        const int position = p.share.kv_len - p.share.q_len + p.first_query + t;
        const int from = std::max(0, first_seen(op, position) - begin), to = std::min(count, position + 1 - begin);
        for (int g = 0; g < group; ++g) first[t * group + g] = from, last[t * group + g] = to;
    }
}

// ---- the parts of a worker's scratch. Results come first, where publish() reads them.

struct Parts {
    uint16_t* out;
    float* states;
    int *first, *last;
};

Parts carve(const Attention& op, const Piece& p, Carver& scratch) {
    const size_t rows = size_t(p.results()) * size_t(group_of(op)), seen = size_t(p.queries) * size_t(group_of(op));
    const size_t floats = rows * size_t(attention_state_floats(op.cache.value_dim));
    if (p.share.splits > 1) {
        float* states = scratch.take<float>(floats);
        return {nullptr, states, scratch.take<int>(seen), scratch.take<int>(seen)};
    }
    uint16_t* out = scratch.take<uint16_t>(rows * size_t(op.cache.value_dim));
    return {out, scratch.take<float>(floats), scratch.take<int>(seen), scratch.take<int>(seen)};
}

void clear_states(float* states, size_t rows, int floats) {
    std::fill(states, states + rows * size_t(floats), 0.f);
    for (size_t i = 0; i < rows; ++i) states[i * size_t(floats)] = -INFINITY;
}

// Converts states [heads][queries][group] to contiguous output rows in the same order.
void finish(const Attention& op, const Kernels& k, int first_head, int heads, int queries, const float* states,
            uint16_t* out) {
    const int dim = op.cache.value_dim, floats = attention_state_floats(dim), group = group_of(op);
    for (int h = 0; h < heads; ++h)
        for (int i = 0; i < queries * group; ++i, states += floats, out += dim) {
            const int head = (first_head + h) * group + i % group;
            k.finish_state(states, op.sinks ? op.sinks[head] : -INFINITY, op.cache.value_scale, dim, out);
        }
}

void place(const Attention& op, int first_head, int heads, int first_row, int queries, const uint16_t* from) {
    const size_t width = size_t(group_of(op)) * size_t(op.cache.value_dim);
    for (int h = 0; h < heads; ++h)
        for (int t = 0; t < queries; ++t, from += width)
            std::memcpy(op.out.data + (first_row + t) * op.out.stride + size_t(first_head + h) * width, from,
                        width * sizeof(uint16_t));
}

// ---- few query rows: keys and values are read in place, all heads of a block before the next

constexpr int kFoundTokens = kAttendTokens + kAttendAhead;

struct Direct {
    float *queries, *scores;
    size_t query_floats;
    const uint16_t **keys, **values;
    uint16_t* wide;

    Direct(const Attention& op, const Kernels& k, const Piece& p, Carver& scratch) {
        const size_t rows = size_t(p.results()) * size_t(group_of(op));
        query_floats = size_t(attention_lines(op.cache.key_dim)) * size_t(k.query_line);
        queries = scratch.take<float>(rows * query_floats);
        scores = scratch.take<float>(rows * kAttendTokens);
        keys = scratch.take<const uint16_t*>(kFoundTokens), values = scratch.take<const uint16_t*>(kFoundTokens);
        wide = take_wide(op, kAttendTokens, p.heads, scratch);
    }
};

void pack_queries(const Attention& op, const Kernels& k, const Piece& p, float* to, size_t query_floats) {
    const int group = group_of(op), dim = op.cache.key_dim;
    for (int h = 0; h < p.heads; ++h)
        for (int t = 0; t < p.queries; ++t)
            for (int g = 0; g < group; ++g, to += query_floats) {
                const uint16_t* row = op.q.data + (p.share.first_row + p.first_query + t) * op.q.stride;
                k.pack_query(row + (h * group + g) * dim, dim, to);
            }
}

void attend_directly(const Attention& op, const Kernels& k, const Piece& p, const Parts& parts, Carver& scratch) {
    const Direct d(op, k, p, scratch);
    pack_queries(op, k, p, d.queries, d.query_floats);
    const int ahead = int(std::clamp<int64_t>(kAheadBytes / 2 / op.cache.key_stride, 1, kAttendAhead));
    for (int begin = p.first_key; begin < p.end_key; begin += kAttendTokens) {
        const int count = std::min(kAttendTokens, p.end_key - begin);
        const int found = d.wide ? count : std::min(kFoundTokens, p.end_key - begin);
        if (d.wide) {
            widen(op, k, p.sequence, begin, found, 0, p.heads, d.wide, d.keys, d.values);
        } else {
            look_up(op, p.sequence, begin, found, d.keys, d.values);
        }
        for (int i = found; i < kFoundTokens; ++i) d.keys[i] = d.keys[found - 1], d.values[i] = d.values[found - 1];
        see(op, p, begin, count, parts.first, parts.last);
        k.attend({d.keys, d.values, ahead, count, p.heads, p.queries * group_of(op), op.cache.key_dim,
                  op.cache.value_dim, d.queries, parts.first, parts.last, logit_scale(op), d.scores, parts.states});
    }
}

// ---- many query rows of one KV head: panels

struct Panels {
    Layout keys, values;
    uint8_t *key_panels, *value_panels;
    float *scores, *part, *total, *maxima, *sums, *factors;
    char *query_pairs, *weight_pairs;
    uint16_t *queries, *wide;
    void* expanded;
    int rows;

    Panels(const Attention& op, const Kernels& k, int rows_of_queries, Carver& scratch) : rows(rows_of_queries) {
        const KvPages& c = op.cache;
        keys = layout_of(Format::kBf16, kTileKeys, c.key_dim, 0);
        values = layout_of(Format::kBf16, 32 * attention_lines(c.value_dim), kTileKeys, 0);
        const size_t n = size_t(rows), results = size_t(values.panels) * n * 16;
        key_panels = scratch.take<uint8_t>(size_t(keys.panels) * keys.panel_bytes);
        value_panels = scratch.take<uint8_t>(size_t(values.panels) * values.panel_bytes);
        scores = scratch.take<float>(n * kTileKeys);
        part = scratch.take<float>(results), total = scratch.take<float>(results);
        maxima = scratch.take<float>(n), sums = scratch.take<float>(n), factors = scratch.take<float>(n);
        query_pairs = scratch.take<char>(n * k.row_bytes(keys));
        weight_pairs = scratch.take<char>(n * k.row_bytes(values));
        queries = scratch.take<uint16_t>(n * size_t(c.key_dim));
        wide = take_wide(op, kTileKeys, 1, scratch);
        expanded = scratch.take<char>(std::max(k.expand_bytes(keys, rows), k.expand_bytes(values, rows)));
    }

    Packed packed(const Kernels& k, char* pairs) const { return {pairs, nullptr, rows, k.packing(keys, rows)}; }
};

void pack_queries(const Attention& op, const Kernels& k, const Piece& p, Panels& m) {
    const int group = group_of(op), dim = op.cache.key_dim;
    const size_t width = size_t(group) * size_t(dim);
    for (int t = 0; t < p.queries; ++t) {
        const uint16_t* row = op.q.data + (p.share.first_row + p.first_query + t) * op.q.stride;
        std::memcpy(m.queries + t * width, row + p.first_head * width, width * sizeof(uint16_t));
    }
    k.pack(m.queries, size_t(dim), nullptr, 0, m.rows, dim, m.keys.padded, m.packed(k, m.query_pairs));
}

void attend_tile(const Attention& op, const Kernels& k, const Piece& p, const Parts& parts, Panels& m, int begin) {
    const KvPages& c = op.cache;
    const uint16_t *keys[kTileKeys], *values[kTileKeys];
    const int count = std::min(kTileKeys, p.end_key - begin), panels = (count + kPanelRows - 1) / kPanelRows;
    if (m.wide) {
        widen(op, k, p.sequence, begin, count, p.first_head, 1, m.wide, keys, values);
    } else {
        look_up(op, p.sequence, begin, count, keys, values);
    }
    const size_t head = m.wide ? 0 : size_t(p.first_head);
    k.pack_keys(keys, head * size_t(c.key_dim), count, c.key_dim, m.key_panels);
    k.matmul(m.keys, m.key_panels, panels, m.packed(k, m.query_pairs), m.scores, m.expanded, nullptr);
    see(op, p, begin, count, parts.first, parts.last);
    k.softmax_tile({m.scores, panels, m.rows, parts.first, parts.last, logit_scale(op), m.maxima, m.sums, m.factors});

    const Layout values_layout = layout_of(Format::kBf16, m.values.rows, count, 0);
    const Packed weights = m.packed(k, m.weight_pairs);
    k.activate(Activation::kNone, 0, m.scores, nullptr, 0, panels, values_layout.padded, weights);
    if (panels * kPanelRows < values_layout.padded) k.clear_columns(panels * kPanelRows, values_layout.padded, weights);
    k.pack_values(values, head * size_t(c.value_dim), count, c.value_dim, values_layout.padded, m.value_panels);
    k.matmul(values_layout, m.value_panels, values_layout.panels, weights, m.part, m.expanded, nullptr);
    k.scale_and_add(m.part, m.factors, values_layout.panels, m.rows, m.total);
}

void attend_by_panels(const Attention& op, const Kernels& k, const Piece& p, const Parts& parts, Carver& scratch) {
    Panels m(op, k, p.queries * group_of(op), scratch);
    if (m.rows == 0) return;
    std::fill(m.total, m.total + size_t(m.values.panels) * size_t(m.rows) * 16, 0.f);
    std::fill(m.maxima, m.maxima + m.rows, -INFINITY), std::fill(m.sums, m.sums + m.rows, 0.f);
    pack_queries(op, k, p, m);
    for (int begin = p.first_key; begin < p.end_key; begin += kTileKeys) attend_tile(op, k, p, parts, m, begin);
    float* state = parts.states;
    for (int i = 0; i < m.rows; ++i, state += attention_state_floats(op.cache.value_dim)) {
        state[0] = m.maxima[i], state[1] = m.sums[i];
        for (int panel = 0; panel < m.values.panels; ++panel)
            std::memcpy(state + 16 + 16 * panel, m.total + (size_t(panel) * size_t(m.rows) + size_t(i)) * 16, 64);
    }
}

// ---- tasks

void compute(const void* context, int task, std::byte* memory) {
    const Attention& op = *static_cast<const Attention*>(context);
    const Kernels& k = *op.now.kernels.get();
    const Piece p = piece_of(op, task);
    Carver scratch(memory);
    const Parts parts = carve(op, p, scratch);
    clear_states(parts.states, size_t(p.results()) * size_t(group_of(op)), attention_state_floats(op.cache.value_dim));
    if (p.share.direct) {
        attend_directly(op, k, p, parts, scratch);
    } else {
        attend_by_panels(op, k, p, parts, scratch);
    }
    if (parts.out) finish(op, k, p.first_head, p.heads, p.queries, parts.states, parts.out);
}

// The states of a sequence: [splits][KV heads][queries][group].
void publish(const void* context, int task, const std::byte* memory) {
    const Attention& op = *static_cast<const Attention*>(context);
    const Piece p = piece_of(op, task);
    if (p.share.splits == 1) {
        const uint16_t* out = reinterpret_cast<const uint16_t*>(memory);
        return place(op, p.first_head, p.heads, p.share.first_row + p.first_query, p.queries, out);
    }
    const size_t floats = size_t(attention_state_floats(op.cache.value_dim));
    const size_t head_rows = size_t(p.share.q_len) * size_t(group_of(op));
    const size_t at = size_t(p.share.first_state) + size_t(p.split) * size_t(p.share.q_len) * size_t(op.heads) +
                      size_t(p.first_head) * head_rows;
    std::memcpy(op.now.states.get() + at * floats, memory, size_t(p.heads) * head_rows * floats * sizeof(float));
}

// Combines the splits of one KV head of one sequence.
struct Merge {
    Share share;
    int head, queries;
};

Merge merge_of(const Attention& op, int task) {
    const Share s = op.now.shares[size_t(share_at(op, &Share::first_merge, task))];
    return {s, std::clamp(task - s.first_merge, 0, op.cache.kv_heads - 1), std::clamp(s.q_len, 0, block_queries(op))};
}

void merge(const void* context, int task, std::byte* memory) {
    const Attention& op = *static_cast<const Attention*>(context);
    const Kernels& k = *op.now.kernels.get();
    const Merge m = merge_of(op, task);
    const int dim = op.cache.value_dim, rows = m.queries * group_of(op);
    const size_t floats = size_t(attention_state_floats(dim)), stride = size_t(m.queries) * size_t(op.heads) * floats;
    Carver scratch(memory);
    uint16_t* out = scratch.take<uint16_t>(size_t(rows) * size_t(dim));
    float* states = scratch.take<float>(size_t(rows) * floats);
    const float* parts = op.now.states.get() + (size_t(m.share.first_state) + size_t(m.head) * size_t(rows)) * floats;
    for (int i = 0; i < rows; ++i)
        k.merge_states(parts + size_t(i) * floats, stride, m.share.splits, dim, states + size_t(i) * floats);
    finish(op, k, m.head, 1, m.queries, states, out);
}

void publish_merged(const void* context, int task, const std::byte* memory) {
    const Attention& op = *static_cast<const Attention*>(context);
    const Merge m = merge_of(op, task);
    place(op, m.head, 1, m.share.first_row, m.queries, reinterpret_cast<const uint16_t*>(memory));
}

// Runs all tasks on the calling thread, in its lane's workspace: for work that is too short to wake workers.
void run_alone(const Attention& op, Host& host, int tasks, int lane) {
    [[maybe_unused]] const FlushSubnormals flush;
    size_t bytes = 0;
    for (int task = 0; task < tasks; ++task) {
        const Piece p = piece_of(op, task);
        Carver scratch;
        carve(op, p, scratch);
        const Direct d(op, host.kernels_of(lane), p, scratch);
        bytes = std::max(bytes, scratch.used());
    }
    std::byte* scratch = host.workspace(lane, bytes);
    for (int task = 0; task < tasks; ++task) compute(&op, task, scratch), publish(&op, task, scratch);
}

}  // namespace

AttentionBatch::AttentionBatch(int most_sequences, int most_pages)
    : most_pages_(most_pages),
      q_lens_(size_t(most_sequences)),
      kv_lens_(size_t(most_sequences)),
      states_(size_t(most_sequences)),
      table_(size_t(most_sequences) * size_t(most_pages)) {}

void AttentionBatch::set(int sequences, const int32_t* q_lens, const int32_t* kv_lens, const int32_t* page_table,
                         int64_t table_stride, int pages, int page_tokens, const int32_t* states) {
    require(sequences >= 0 && sequences <= most_sequences(), "There are more sequences than the batch was made for.");
    int64_t rows = 0;
    for (int s = 0; s < sequences; ++s) {
        require(q_lens[s] >= 0 && kv_lens[s] >= q_lens[s], "A sequence must have at least as many keys as rows.");
        require(kv_lens[s] <= int64_t(most_pages_) * page_tokens, "A sequence has more keys than its pages can hold.");
        const int count = (kv_lens[s] + page_tokens - 1) / page_tokens;
        require(count <= table_stride, "The page table has too few columns.");
        for (int i = 0; i < count; ++i) {
            const int32_t page = page_table[s * table_stride + i];
            if (page < 0 || page >= pages)
                throw Error(PROA_ERROR_ARGUMENT, "Page " + std::to_string(page) + " of sequence " + std::to_string(s) +
                                                     " does not exist: there are " + std::to_string(pages) + " pages.");
        }
        rows += q_lens[s];
    }
    for (int s = 0; s < sequences; ++s) {
        const int count = (kv_lens[s] + page_tokens - 1) / page_tokens;
        q_lens_[size_t(s)] = q_lens[s], kv_lens_[size_t(s)] = kv_lens[s];
        states_[size_t(s)] = states ? states[s] : 0;
        std::copy(page_table + s * table_stride, page_table + s * table_stride + count,
                  table_.begin() + int64_t(s) * most_pages_);
    }
    sequences_ = sequences, rows_ = int(rows);
}

void check(const Attention& op) {
    check(op.cache);
    require(op.batch, "The batch is a null pointer.");
    require(op.heads >= op.cache.kv_heads && op.heads <= 4096 && op.heads % op.cache.kv_heads == 0,
            "The number of heads must be a multiple of the number of KV heads, and at most 4096.");
    require(op.window >= 0, "The window must not be negative.");
    check_rows(op.q.data, op.q.stride, int64_t(op.heads) * op.cache.key_dim, "the queries");
    check_rows(op.out.data, op.out.stride, int64_t(op.heads) * op.cache.value_dim, "the output of attention");
}

void run(const Attention& op, Host& host, int rows, int lane) {
    require(rows == op.batch->rows(), "The step and its batch differ in their number of rows.");
    if (rows == 0) return;
    if (int(op.now.shares.size()) != op.batch->most_sequences()) {
        host.pool.settle();
        op.now.shares.assign(size_t(op.batch->most_sequences()), {});
    }
    const Totals total = divide(op);
    op.now.kernels.set(&host.kernels_of(lane)), op.now.sequences.set(op.batch->sequences()), op.now.rows.set(rows);
    if (total.bytes <= kAloneBytes && !total.panels && total.merges == 0) return run_alone(op, host, total.tasks, lane);
    const size_t floats = size_t(attention_state_floats(op.cache.value_dim));
    op.now.states.set(reinterpret_cast<float*>(host.workspace(lane, size_t(total.states) * floats * sizeof(float))));
    Phase phase = spread(total.tasks, host.pool.nodes());
    phase.run = compute, phase.publish = publish, phase.context = &op;
    host.pool.run(phase, lane);
    if (total.merges == 0) return;
    phase = spread(total.merges, host.pool.nodes());
    phase.run = merge, phase.publish = publish_merged, phase.context = &op;
    host.pool.run(phase, lane);
}

}  // namespace proa
