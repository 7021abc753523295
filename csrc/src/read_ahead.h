// Weights that will probably be wanted soon, read into the caches of the workers that will compute with them, while
// these have nothing else to do. Belongs here: which pieces, who read them. Never: guessing the experts, arithmetic.
//
// It changes no result: whatever is read is read again, from a nearer memory, by the tasks that need it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "host.h"
#include "moe.h"
#include "row_tasks.h"

namespace proa {

// Of one layer: gate and up of some of its experts, cut as the tasks of a job are that needs just these.
class Pieces {
  public:
    // ids: numbers of experts, the likeliest first. Nobody may be reading.
    void cut(const Experts& experts, const std::vector<int>& ids, int threads);
    void read(int task, const std::byte* scratch) const;

    const Experts* experts() const { return experts_; }
    const RowTasks& tasks() const { return tasks_; }
    const std::vector<int>& ids() const { return ids_; }
    bool has(int id) const;
    // By its scratch: who has begun to read an expert's panel, or null.
    const std::byte* reader(int id, int node, int panel) const;
    void end() { over_.store(true, std::memory_order_relaxed); }

  private:
    const Experts* experts_ = nullptr;
    RowTasks tasks_;
    std::vector<int> ids_;
    std::unique_ptr<std::atomic<const std::byte*>[]> readers_;  // of task
    size_t room_ = 0;
    std::atomic<bool> over_{true};
};

class ReadAhead {
  public:
    explicit ReadAhead(Host& host) : host_(host) {}
    ~ReadAhead() { end(); }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;

    // Workers that are idle begin; returns at once. ids as Pieces'.
    void begin(const Experts& experts, const std::vector<int>& ids);
    void end();

    // What was read last, if it is of these experts.
    const Pieces* of(const Experts& experts) const;

  private:
    static constexpr size_t kTurns = 4;  // a late worker may still read what was cut before
    Host& host_;
    Pieces turns_[kTurns];
    size_t turn_ = 0;
};

// Which workers should take which of a job's tasks on gate and up. groups: of each repeat, its expert; ascending.
void hand_out(const Pieces& pieces, const RowTasks& tasks, const std::vector<int>& experts, Handing& handing);

}  // namespace proa
