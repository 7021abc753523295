// Idle workers prefetch weights that will probably be needed soon, each into its own cache; later each task is given to
// the worker that has its weights (hand_out). Belongs here: which pieces, and which worker read them. Never: predicting
// the experts, arithmetic.
//
// A prefetch changes no result: the tasks read the same weights again, from cache.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "host.h"
#include "moe.h"
#include "row_tasks.h"

namespace proa {

// Gate and up of some experts of one layer, split into the same tasks as a job with exactly these experts.
class Pieces {
  public:
    // Replaces the pieces. ids: numbers of experts, the likeliest first. No worker may be in read().
    void cut(const Experts& experts, const std::vector<int>& ids, int threads);
    void read(int task, const std::byte* scratch) const;

    const Experts* experts() const { return experts_; }
    const RowTasks& tasks() const { return tasks_; }
    const std::vector<int>& ids() const { return ids_; }
    bool has(int id) const;
    // The worker, identified by its scratch, that has started to read an expert's panel; null: none.
    const std::byte* reader(int id, int node, int panel) const;
    void end() { over_.store(true, std::memory_order_relaxed); }

  private:
    const Experts* experts_ = nullptr;
    RowTasks tasks_;
    std::vector<int> ids_;
    std::unique_ptr<std::atomic<const std::byte*>[]> readers_;  // reader of each task
    size_t room_ = 0;
    std::atomic<bool> over_{true};
};

class ReadAhead {
  public:
    // Throws Error (argument) if the host has another one: tasks for idle workers have one caller.
    explicit ReadAhead(Host& host);
    ~ReadAhead();
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    // Lets idle workers start reading, and returns without waiting for them. ids: as for Pieces::cut.
    void begin(const Experts& experts, const std::vector<int>& ids);
    void end();

    // The pieces that were read last, if they are of these experts; else null.
    const Pieces* of(const Experts& experts) const;

  private:
    // Used in rotation: a late worker may still read earlier pieces. Once around, begin() waits for late workers.
    static constexpr size_t kTurns = 16;
    Host& host_;
    Pieces turns_[kTurns];
    size_t turn_ = 0;
};

// Assigns a job's gate and up tasks to the workers that have read their weights. experts: expert of each repeat,
// ascending.
void hand_out(const Pieces& pieces, const RowTasks& tasks, const std::vector<int>& experts, Handing& handing);

}  // namespace proa
