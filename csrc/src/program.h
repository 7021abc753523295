// A recorded step: operations over fixed buffers, replayed with one call for any number of rows up to the buffers'.
// Belongs here: their order. Never: their arithmetic, the contents of the buffers.
#pragma once

#include <deque>
#include <memory>
#include <variant>

#include "attention.h"
#include "delta.h"
#include "head_linear.h"
#include "linear.h"
#include "lookup.h"
#include "moe.h"
#include "outbox.h"
#include "rows.h"

namespace proa {

using Operation = std::variant<Embed, Lookup, RmsNorm, Add, GatedAdd, Gate, Rotary, WriteKv, Route, Argmax, Attention,
                               GatedDelta, Linear, HeadLinear, Moe>;

class Program {
  public:
    Program(std::shared_ptr<Host> host, int most_sequences, int most_pages)
        : batch(most_sequences, most_pages), host_(std::move(host)) {}
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Appends an operation. Throws Error if its arguments are invalid.
    void add(Operation operation) {
        std::visit([](const auto& op) { proa::check(op); }, operation);
        operations_.push_back(std::move(operation));
    }
    size_t size() const { return operations_.size(); }

    // Runs operations [first, end) on `rows` rows; after an error the rest is not run. When it returns no worker, not
    // even a late one, reads the program or its buffers, so that all may be freed.
    void run(size_t first, size_t end, int rows, int lane) {
        const struct Settle {
            Pool& pool;
            ~Settle() { pool.settle(); }
        } settle{host_->pool};
        if (host_->outbox) host_->outbox->finish();
        host_->regimes[size_t(lane)] = batch.regime();
        for (size_t i = first; i < end; ++i)
            std::visit([&](const auto& op) { proa::run(op, *host_, rows, lane); }, operations_[i]);
    }

    const Host& host() const { return *host_; }

    AttentionBatch batch;  // of the step, read by every attention

  private:
    std::shared_ptr<Host> host_;
    std::deque<Operation> operations_;  // a deque never moves its elements
};

}  // namespace proa
