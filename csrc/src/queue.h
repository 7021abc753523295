// Jobs for the experts from somebody who may not wait, allocate or lock: a program, and later a GPU's doorbell. Belongs
// here: one producer's ring and the thread that serves it. Never: what experts compute.
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
    // `layers` and all that jobs point to must outlive the queue. slots: jobs that may be under way, a power of two.
    Queue(std::shared_ptr<Host> host, std::vector<const Experts*> layers, int slots, int lane, int spin_us);
    ~Queue();
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // One producer. The number of the job, from 1 on, or 0 if all slots are taken. Writes a slot and a counter.
    uint64_t submit(const Job& job);

    // Whether job `number` is finished. Throws what it, or one before it, failed with: jobs run in order, none after
    // that.
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
