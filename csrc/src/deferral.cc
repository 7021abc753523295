#include "deferral.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace proa {

// Reserved, since a late worker may still read rows of an earlier job; pages that are not used take no memory.
Deferral::Deferral(int per_token, int last, int most_tokens, int top_k, int hidden)
    : per_token_(per_token), last_(last), top_k_(top_k), hidden_(hidden) {
    if (!per_token) return;
    x_.reserve(size_t(most_tokens) * size_t(hidden));
    y_.reserve(size_t(most_tokens) * size_t(hidden));
}

void Deferral::begin(int layer, int tokens, bool decode) {
    const bool follows = decode && decode_ && layer == layer_ + 1 && tokens == tokens_;
    if (decode && layer > 0 && !follows)
        throw Error(PROA_ERROR_ARGUMENT,
                    "A decode step's job has layer " + std::to_string(layer) + " and " + std::to_string(tokens) +
                        " tokens, after one of layer " + std::to_string(layer_) + " and " + std::to_string(tokens_) +
                        " tokens; every layer must ring, in order, or deferred experts would be lost.");
    if (!follows) is_owed_ = false;
    has_pairs_ = false;
    layer_ = layer, tokens_ = tokens, decode_ = decode;
}

void Deferral::take(std::vector<int32_t>& ids, const float* weights, const uint16_t* x) {
    if (!decode_ || !per_token_ || layer_ == last_) return;
    const size_t top_k = size_t(top_k_), hidden = size_t(hidden_);
    ids_.assign(ids.size(), -1);
    x_.resize(size_t(tokens_) * hidden);
    for (size_t t = 0; t < size_t(tokens_); ++t) {
        bool any = false;
        for (size_t k = 0; k < top_k; ++k) {
            const size_t pair = t * top_k + k;
            if (ids[pair] < 0 || !is_deferred(weights + t * top_k, int(k))) continue;
            ids_[pair] = ids[pair], ids[pair] = -1;
            any = true;
        }
        if (!any) continue;
        std::copy_n(x + t * hidden, hidden, x_.data() + t * hidden);
        has_pairs_ = true;
    }
    if (!has_pairs_) return;
    weights_.assign(weights, weights + ids.size());
    y_.resize(size_t(tokens_) * hidden);
}

// The later one of two equal weights is the lighter.
bool Deferral::is_deferred(const float* weights, int choice) const {
    int heavier = 0;
    for (int k = 0; k < top_k_; ++k)
        heavier += weights[k] > weights[choice] || (weights[k] == weights[choice] && k < choice);
    return heavier >= top_k_ - per_token_;
}

}  // namespace proa
