// The doorbell that a GPU rings from inside its graph: one block of memory that both sides address, and the thread that
// runs the jobs written there. Belongs here: the block, the thread, its errors. Never: the experts' arithmetic, which
// experts are on the CPU.
//
// The GPU writes a job, rings with the next number (store-release of `rung`) and waits until `answer` (load-acquire)
// holds that number, or a failure. A GPU that cannot store a changing number copies its jobs and signals by flags or
// by calls (Way). src/proa/hybrid/transport.py explains why each side sees the other's writes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "deferral.h"
#include "host.h"
#include "moe.h"
#include "read_ahead.h"

namespace proa {

constexpr int kProbeLayer = -1;      // a job without work: answered at once
constexpr int kDecodeJob = 1 << 20;  // added to the layer of a decode step's job, of which pairs may be deferred

// How the GPU signals a job.
enum class Way {
    kNumber,  // stores the job's number in `rung`
    kFlags,   // sets `rung` to 1, and to 0 once `done` is set; writes a job only after `ready` is set
    kCalls,   // calls ring_copied and wait_copied
};

// Offsets in the block. `answer` is one 64-bit word: its low half is the number of the last answered job, its high
// half, `dead`, the code of a failure after which no job is answered. One load reads both.
// `done` and `ready` are flags of kFlags: 1 or 0, and after a failure kFailed too, permanently.
// `foreseen` is a word like `rung`, for predictions: the experts that the next job will probably need, each row's
// likeliest first. They are not answered and may be missed. They come at any time; one that is read while the next is
// written is wrong, which is harmless. In a copied job (kFlags, kCalls) ids, weights and x are at their offsets in a
// block for its number of tokens.
struct DoorbellLayout {
    int64_t rung, answered, dead, done, ready, header;              // the header: int32 layer, tokens, number
    int64_t foreseen, foreseen_layer, foreseen_rows, foreseen_ids;  // uint32 number, int32; int32 [rows][top_k]
    int64_t ids, weights, x, y, bytes;  // int32, float32 [tokens][top_k]; bfloat16, float32 [tokens][hidden]
};
constexpr int kForeseenRows = 4;  // most rows of a prediction
constexpr uint32_t kFlag = 1, kFailed = 1u << 31;
DoorbellLayout doorbell_layout(int most_tokens, int top_k, int hidden);

struct DoorbellSize {
    int most_tokens, top_k, hidden;
};

// Settings of the doorbell's thread. lane: of the pool, on which it runs the jobs. cpus: its affinity; empty: any.
// spin_us: how long it polls after the last step before it sleeps.
// read_ahead: act on predictions. decode_tokens: jobs of up to this many tokens use decode's fixed kernels (Regime);
// 0: none. deferred: of a token of a decode step (kDecodeJob), the most pairs that are computed after the answer.
struct DoorbellService {
    int lane, spin_us;
    std::vector<int> cpus;
    bool read_ahead;
    int decode_tokens = 0, deferred = 0;
};

struct DoorbellCounters {
    uint64_t jobs, pairs, weight_bytes;  // (token, expert) pairs; bytes of the experts in jobs
    uint64_t moe_ns, waiting_ns;         // waiting: from an answer to the next ring, while armed
    uint64_t experts, foreseen;          // experts in jobs, and how many of these were predicted
    uint64_t gaps, gap_ns;               // intervals between the jobs of consecutive layers
    uint64_t deferred, deferred_ns;      // of the pairs and of moe_ns, what was computed after the answer
};

class Doorbell {
  public:
    // `layers` and `memory` must outlive it, and no GPU may ring once it is destroyed.
    Doorbell(std::shared_ptr<Host> host, std::vector<const Experts*> layers, std::byte* memory, DoorbellSize size,
             Way way, const DoorbellService& service);
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    // Call before a step that may ring, and after it: between the two this thread and the workers do not sleep. Steps
    // may overlap. After the last one no worker, not even a late one, reads weights or jobs.
    void arm();
    void disarm();

    // Throws the error of a failed job, at this and every later call; or, once, PROA_ERROR_NUMERICS if a job's result
    // was non-finite.
    void check();

    // Fails the doorbell from outside: pending waits return.
    void fail(int code, const std::string& what);

    // Signals from the CPU, in place of a GPU, that the job with this number is written. With kFlags the number is read
    // from the copied job; if it was answered already there is nothing to do.
    void ring(uint32_t number);
    // Waits until job `number` is answered (kFlags: until the next job may be written); false after a failure or the
    // timeout.
    bool wait(uint32_t number, int64_t timeout_us);
    // kCalls: host functions, called by the GPU driver in stream order.
    void ring_copied() { ring(copied_number()); }
    void wait_copied();

    DoorbellCounters counters() const;

  private:
    using Count = std::atomic<uint64_t>;

    std::atomic_ref<uint32_t> rung() const;
    std::atomic_ref<uint64_t> answer() const;
    std::atomic_ref<uint32_t> flag(int64_t at) const { return std::atomic_ref<uint32_t>(*this->at<uint32_t>(at)); }
    uint32_t copied_number() const { return uint32_t(at<int32_t>(layout_.header)[2]); }
    uint32_t flagged_number(uint32_t rang, uint32_t last) const;
    void say_done();
    void answer_flags(bool rings);
    template <class Seen>
    bool wait_until(const Seen& seen, int64_t timeout_us) const;
    bool dead() const { return answer().load(std::memory_order_acquire) >> 32; }
    void bind(const std::vector<int>& cpus);
    void serve();
    void park();
    void unpark();
    void answer_job(uint32_t number);
    void run(const int32_t* header);
    void run_deferred();
    void compute(const std::vector<int32_t>& ids, const float* weights, const uint16_t* x, float* y);
    void look_ahead();
    bool look_at(const float* y, const std::vector<int32_t>& ids);
    uint64_t count_weights(const std::vector<int32_t>& ids);
    template <class T>
    T* at(int64_t offset) const {
        return reinterpret_cast<T*>(memory_ + offset);
    }

    std::shared_ptr<Host> host_;
    const std::vector<const Experts*> layers_;
    std::byte* const memory_;
    const DoorbellSize size_;
    const DoorbellLayout layout_;
    const Way way_;
    const int lane_, spin_us_, decode_tokens_;
    std::unique_ptr<ReadAhead> read_ahead_;  // null: predictions are ignored
    std::vector<int> foreseen_;              // the last prediction
    uint32_t last_foreseen_ = 0;
    std::vector<Moe> operations_;  // used in rotation: a late worker may still read an earlier one
    Deferral deferral_;
    std::vector<int32_t> ids_;              // the job's ids, copied: the next job overwrites the block
    std::vector<bool> used_;                // experts of the job
    int layer_ = kProbeLayer, tokens_ = 0;  // of the job
    size_t turn_ = 0, settled_ = 0;         // operations used in all, and before no worker could be late with one
    Count jobs_{0}, pairs_{0}, weight_bytes_{0}, moe_ns_{0}, waiting_ns_{0}, experts_{0}, foreseen_experts_{0};
    Count gaps_{0}, gap_ns_{0}, deferred_{0}, deferred_ns_{0};
    std::chrono::steady_clock::time_point done_at_;  // when the last job's experts were done
    int done_layer_ = kProbeLayer;
    std::atomic<uint32_t> looked_{0};  // number of the last job whose result was checked
    std::atomic<int> armed_{0};
    std::atomic<bool> stop_{false}, parked_{false};
    mutable std::mutex mutex_;  // guards the members below
    std::condition_variable unparked_;
    std::exception_ptr failure_;
    std::string not_finite_;
    std::thread thread_;
};

}  // namespace proa
