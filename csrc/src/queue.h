// A queue of jobs for the experts, for a producer that may not wait, allocate or lock. Belongs here: the ring of one
// producer and the thread that runs its jobs. Never: the experts' arithmetic.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "host.h"
#include "moe.h"

namespace proa {

struct Job {
    int layer, tokens, top_k;
    const int32_t* ids;
    const float* weights;
    const uint16_t* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride;
    bool wide;
};

class Queue {
  public:
    // `layers` and all memory that jobs point to must outlive the queue. slots: most jobs in flight, a power of two.
    Queue(std::shared_ptr<Host> host, std::vector<const Experts*> layers, int slots, int lane, int spin_us);
    ~Queue();
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Queues a job; from one thread only. Returns its number, from 1 on, or 0 if all slots are taken.
    uint64_t submit(const Job& job);

    // True if job `number` is finished. Throws the error of this job or of an earlier one: jobs run in order, and stop
    // at an error.
    bool done(uint64_t number) const;
    void wait(uint64_t number) const;

    int layers() const { return int(layers_.size()); }
    const Experts& layer(int i) const { return *layers_[size_t(i)]; }

  private:
    void serve();
    bool run(const Job& job);

    std::shared_ptr<Host> host_;
    std::vector<const Experts*> layers_;
    std::vector<Job> slots_;
    const int lane_, spin_us_;
    alignas(64) std::atomic<uint64_t> submitted_{0};
    alignas(64) std::atomic<uint64_t> finished_{0};
    std::atomic<bool> failed_{false}, stop_{false}, asleep_{false};
    std::exception_ptr error_;  // written before failed_
    std::thread thread_;
};

}  // namespace proa
