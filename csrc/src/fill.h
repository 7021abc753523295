// A checkpoint's rows -> where weights stay, by all workers. Belongs here: cutting that into tasks, reading files.
// Never: what a format is (pack.h, stored.h).
//
// Each job belongs to a team, so pages that its target touches for the first time, and the packing, are of that node.
#pragma once

#include <exception>
#include <mutex>
#include <vector>

#include "coded.h"
#include "pack.h"
#include "pool.h"

namespace proa {

// A rectangle of a stored tensor and its target: panels, every `step` of them, or plain rows of bfloat16.
struct Fill {
    int fd;           // -1: `from` is an address
    uint64_t from;    // of the first row
    uint64_t stride;  // bytes from row to row
    Stored stored;
    Order order;
    bool plain;  // target rows of bfloat16, layout.columns each; else panels
    Layout layout;
    int step;
    uint8_t* out;
    int team;
    Scales scales{};  // of codes
};

// The file of a job cannot be read. error: errno, or 0 where the file ends too early.
struct ReadFailed : Error {
    ReadFailed(int64_t which, int number)
        : Error(PROA_ERROR_SYSTEM, "A file cannot be read."), job(which), error(number) {}
    int64_t job;
    int error;
};

// A number or scale that a job read is NaN or infinite, or becomes infinite as bfloat16.
struct NotFinite : Error {
    explicit NotFinite(int64_t which) : Error(PROA_ERROR_ARGUMENT, "A stored number is not finite."), job(which) {}
    int64_t job;
};

// Tasks may not throw: what the first of a phase throws is kept for the caller.
class FirstFailure {
  public:
    template <class Body>
    void guard(Body&& body) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
            body();
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!failed_.exchange(true)) first_ = std::current_exception();
        }
    }
    void rethrow() const {
        if (first_) std::rethrow_exception(first_);
    }

  private:
    std::mutex mutex_;
    std::atomic<bool> failed_{false};
    std::exception_ptr first_;
};

// The rows of a job whose source is in memory, as float32. Throws Error (argument).
void decode(const Fill& job, float* to);

// Throws ReadFailed; NotFinite; Error (argument) for a layout that does not take what is stored; what Pool::run throws.
void fill(Pool& pool, const std::vector<Fill>& jobs);

// Bytes [first, first + count) of an arena get memory from the team's workers.
struct Touch {
    proa_arena* arena;
    size_t first, count;
    int team;
};

// Throws what proa_arena_touch fails with; what Pool::run throws.
void touch(Pool& pool, const std::vector<Touch>& spans);

}  // namespace proa
