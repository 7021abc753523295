// Causal attention over a paged KV cache. Belongs here: splitting it into tasks. Never: arithmetic.
#pragma once

#include <vector>

#include "host.h"
#include "late.h"
#include "rows.h"

namespace proa {

// With up to this many rows per sequence, keys are read in place (kernels/attention.h).
constexpr int kDirectQueries = 4;

// The sequences of a step: their rows and pages. Set once per step, read by every layer; its memory is never
// reallocated, since late tasks may still read it.
class AttentionBatch {
  public:
    AttentionBatch(int most_sequences, int most_pages);  // most_pages: per sequence

    // Sequence s owns the next q_lens[s] rows; the last of them is its token kv_lens[s] - 1. Its pages, in order, begin
    // at page_table + s * table_stride. states[s]: its slot of recurrent states; null: 0 for all. Throws Error, and
    // keeps the old batch, if anything does not fit.
    void set(int sequences, const int32_t* q_lens, const int32_t* kv_lens, const int32_t* page_table,
             int64_t table_stride, int pages, int page_tokens, const int32_t* states = nullptr);

    // Sets which kernels compute the rows; initially kByRows. kDecode: every sequence has one row.
    void set_regime(Regime regime) { regime_ = regime; }
    Regime regime() const { return regime_; }

    int sequences() const { return sequences_; }
    int most_sequences() const { return int(q_lens_.size()); }
    int rows() const { return rows_; }
    int q_len(int s) const { return q_lens_[size_t(s)]; }
    int kv_len(int s) const { return kv_lens_[size_t(s)]; }
    int state(int s) const { return states_[size_t(s)]; }
    int most_pages() const { return most_pages_; }
    const int32_t* pages(int s) const { return table_.data() + size_t(s) * size_t(most_pages_); }

  private:
    int most_pages_, sequences_ = 0, rows_ = 0;
    Regime regime_ = Regime::kByRows;
    std::vector<int32_t> q_lens_, kv_lens_, states_, table_;
};

// One sequence's part of a run: its tasks, and where their partial results go if its keys are split over tasks.
struct AttentionShare {
    int first_task, first_row, q_len, kv_len;
    int blocks, splits;  // blocks of its rows; splits of its keys (more than one only with one block)
    int first_state, first_merge;
    bool direct;   // keys are read in place, not packed into panels
    bool aligned;  // the first key of a block is on a fixed grid: see piece_of
};

struct Attention {
    ConstRows q;  // rows of [heads][key_dim]
    Rows out;     // rows of [heads][value_dim]
    KvPages cache;
    const AttentionBatch* batch;
    int heads;
    int window;  // keys that a row sees, its own included; 0: all earlier ones
    float scale;
    const float* sinks;  // [heads] or null

    struct Now {
        Late<const Kernels*> kernels;
        Late<int> sequences, rows;
        Late<float*> states;
        mutable std::vector<AttentionShare> shares;  // one per possible sequence of the batch
    };
    Now now{};
};

void check(const Attention& op);  // see rows.h

// Keys are split by the lengths of the batch only, and parts are added in order: results do not depend on the threads.
void run(const Attention& op, Host& host, int rows, int lane);

}  // namespace proa
