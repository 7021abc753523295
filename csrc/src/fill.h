// Loading: reads a checkpoint's rows and packs them into their final memory, by all workers. Belongs here: splitting it
// into tasks, reading files. Never: formats (pack.h, stored.h).
//
// Each job belongs to a team, so that pages touched for the first time lie on the team's node, and packing runs there.
#pragma once

#include <exception>
#include <mutex>
#include <vector>

#include "coded.h"
#include "pack.h"
#include "pool.h"

namespace proa {

// A job: a rectangle of a stored tensor and its target: panels, `step` panels apart, or plain rows of bfloat16.
struct Fill {
    int fd;           // -1: `from` is an address
    uint64_t from;    // offset or address of the first row
    uint64_t stride;  // bytes from row to row
    Stored stored;
    Order order;
    bool plain;  // the target is rows of bfloat16, layout.columns each; else panels
    Layout layout;
    int step;
    uint8_t* out;
    int team;
    Scales scales{};  // of quantised types
};

// The file of a job cannot be read. error: errno, or 0 if the file ends too early.
struct ReadFailed : Error {
    ReadFailed(int64_t which, int number)
        : Error(PROA_ERROR_SYSTEM, "A file cannot be read."), job(which), error(number) {}
    int64_t job;
    int error;
};

// A value or scale that a job read is NaN or infinite, or overflows bfloat16.
struct NotFinite : Error {
    explicit NotFinite(int64_t which) : Error(PROA_ERROR_ARGUMENT, "A stored value is not finite."), job(which) {}
    int64_t job;
};

// Tasks may not throw: keeps the first exception of a phase for the caller.
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

// Dequantises the rows of a job whose source is in memory to float32. Throws Error (argument).
void decode(const Fill& job, float* to);

// Runs all jobs. Throws ReadFailed; NotFinite; Error (argument) for a layout that cannot hold the stored type; and what
// Pool::run throws.
void fill(Pool& pool, const std::vector<Fill>& jobs);

// Bytes [first, first + count) of an arena, to be touched by the team's workers.
struct Touch {
    proa_arena* arena;
    size_t first, count;
    int team;
};

// Touches all ranges. Throws the errors of proa_arena_touch and of Pool::run.
void touch(Pool& pool, const std::vector<Touch>& spans);

}  // namespace proa
