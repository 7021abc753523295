// Expert deferral, which is lossy: the lightest pairs of a decode step's job are computed after its answer, while the
// GPU goes on, and their sum is added to the next layer's answer. Belongs here: which pairs, and what is kept for them
// until then. Never: computing experts, the protocol.
//
// A token's `per_token` choices of least weight may be deferred, whichever device computes them; of these, the job's
// pairs are. So the heaviest choices are always in time, and the rule does not depend on where experts are.
#pragma once

#include <cstdint>
#include <vector>

namespace proa {

class Deferral {
  public:
    // per_token: 0: nothing is deferred. last: the last layer, which defers nothing, so that every step is complete.
    Deferral(int per_token, int last, int most_tokens, int top_k, int hidden);

    // Begins a job, which drops the sum of a job that it does not follow. decode: of a decode step, whose layers all
    // have a job, one after the other. Throws Error (argument) if a decode step's job does not follow the layer before.
    void begin(int layer, int tokens, bool decode);

    // Moves the deferred pairs out of `ids` [tokens][top_k], where -1 replaces them, and copies what they need: the GPU
    // writes the next job after the answer. weights: of all choices [tokens][top_k]; x [tokens][hidden].
    void take(std::vector<int32_t>& ids, const float* weights, const uint16_t* x);

    // The pairs that were taken, to be computed into y.
    bool has_pairs() const { return has_pairs_; }
    const std::vector<int32_t>& ids() const { return ids_; }
    const float* weights() const { return weights_.data(); }
    const uint16_t* x() const { return x_.data(); }
    float* y() { return y_.data(); }  // [tokens][hidden]
    void computed(bool finite) { has_pairs_ = false, is_owed_ = true, is_finite_ = finite; }

    // The sum that the job under way owes to its step, or null.
    const float* owed() const { return is_owed_ ? y_.data() : nullptr; }
    bool owes_finite() const { return !is_owed_ || is_finite_; }
    void paid() { is_owed_ = false; }

  private:
    bool is_deferred(const float* weights, int choice) const;

    const int per_token_, last_, top_k_, hidden_;
    int layer_ = -1, tokens_ = 0;  // of the job under way, or the last one
    bool decode_ = false;
    bool has_pairs_ = false, is_owed_ = false, is_finite_ = true;
    std::vector<int32_t> ids_;
    std::vector<float> weights_, y_;
    std::vector<uint16_t> x_;
};

}  // namespace proa
