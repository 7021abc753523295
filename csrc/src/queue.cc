#include "queue.h"

#include <chrono>

namespace proa {

Queue::Queue(std::shared_ptr<Host> host, std::vector<const Experts*> layers, int slots, int lane, int spin_us)
    : host_(std::move(host)),
      layers_(std::move(layers)),
      slots_(size_t(slots)),
      lane_(lane),
      spin_us_(spin_us),
      thread_([this] { serve(); }) {}

Queue::~Queue() {
    stop_.store(true, std::memory_order_seq_cst);
    submitted_.fetch_add(1, std::memory_order_seq_cst);  // so that a sleeper sees a change
    submitted_.notify_all();
    thread_.join();
}

uint64_t Queue::submit(const Job& job) {
    const uint64_t number = submitted_.load(std::memory_order_relaxed) + 1;
    if (number - finished_.load(std::memory_order_acquire) > slots_.size()) return 0;
    slots_[(number - 1) & (slots_.size() - 1)] = job;
    submitted_.store(number, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) submitted_.notify_one();
    return number;
}

bool Queue::done(uint64_t number) const {
    if (finished_.load(std::memory_order_acquire) >= number) return true;
    if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(error_);
    return false;
}

void Queue::wait(uint64_t number) const {
    while (!done(number)) std::this_thread::yield();
}

void Queue::serve() {
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    for (uint64_t next = 1; !stop_.load(std::memory_order_relaxed);) {
        if (submitted_.load(std::memory_order_seq_cst) >= next) {
            if (stop_.load(std::memory_order_seq_cst)) return;  // the counter was moved to wake this thread
            if (!run(slots_[(next - 1) & (slots_.size() - 1)])) return;
            finished_.store(next++, std::memory_order_release);
            idle_since = Clock::now();
        } else if (Clock::now() - idle_since > std::chrono::microseconds(spin_us_)) {
            asleep_.store(true, std::memory_order_seq_cst);
            submitted_.wait(next - 1, std::memory_order_seq_cst);
            asleep_.store(false, std::memory_order_seq_cst);
            idle_since = Clock::now();
        } else {
            relax();
        }
    }
}

bool Queue::run(const Job& job) {
    const Moe op{layers_[size_t(job.layer)],
                 job.top_k,
                 job.ids,
                 job.weights,
                 job.x,
                 job.x_stride,
                 job.y,
                 job.y_stride,
                 job.wide};
    try {
        proa::run(op, *host_, job.tokens, lane_);
    } catch (...) {
        error_ = std::current_exception();
    }
    host_->pool.settle();  // the caller may now free or reuse the job's buffers
    if (error_) failed_.store(true, std::memory_order_release);
    return !error_;
}

}  // namespace proa
