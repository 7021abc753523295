// A bell that a GPU rings from inside its graph: one block of memory that both sides address, and the thread that runs
// the experts of the layer it finds there. Belongs here: the block, the thread, its errors. Never: what experts
// compute, and which are the CPU's.
//
// The other side writes a job, rings with the next number (a release of `rung`) and waits until `answer` (an acquire)
// holds that number, or a failure. Where it cannot store a number that changes, jobs come as copies and it says so by
// flags, or by calls (Way). Why each sees what the other wrote stands in src/proa/hybrid/transport.py.
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

#include "host.h"
#include "moe.h"
#include "read_ahead.h"

namespace proa {

constexpr int kProbeLayer = -1;  // a job without work: answered at once

// How the other side says that a job is there.
enum class Way {
    kNumber,  // by the job's number in `rung`
    kFlags,   // by 1 in `rung`, and 0 when it has seen `done`; it writes no job before it has seen `ready`
    kCalls,   // by calls of ring_copied and wait_copied
};

// Offsets in the block. `answer` is one word of 64 bits: its low half is the number of the last job answered, its high
// half, `dead`, the code of a failure after which nothing is answered any more. One load tells both.
// `done` and `ready` are flags of kFlags: 1 or 0, and after a failure kFailed besides, for good.
// `foreseen` is a word as `rung`, of messages that want no answer and may be missed: experts that the next job will
// probably need, each row's likeliest first. They come at any time; one that is read while the next is written is
// wrong, and does no harm. Of a copied job (kFlags, kCalls) ids, weights and x stand where they do in a block for its
// tokens alone.
struct DoorbellLayout {
    int64_t rung, answered, dead, done, ready, header;              // the header: int32 layer, tokens, number
    int64_t foreseen, foreseen_layer, foreseen_rows, foreseen_ids;  // uint32 number, int32; int32 [rows][top_k]
    int64_t ids, weights, x, y, bytes;  // int32, float32 [tokens][top_k]; bfloat16, float32 [tokens][hidden]
};
constexpr int kForeseenRows = 4;  // at most
constexpr uint32_t kFlag = 1, kFailed = 1u << 31;
DoorbellLayout doorbell_layout(int most_tokens, int top_k, int hidden);

struct DoorbellSize {
    int most_tokens, top_k, hidden;
};

// The thread that answers. cpus: where it may run; empty: anywhere. spin_us: how long it goes on looking after the last
// step. read_ahead: it listens to `foreseen`.
// decode_tokens: jobs of up to so many tokens are rows of decode, whose kernels are fixed (Regime); 0: no job's are.
struct DoorbellService {
    int lane, spin_us;
    std::vector<int> cpus;
    bool read_ahead;
    int decode_tokens = 0;
};

struct DoorbellCounters {
    uint64_t jobs, pairs, weight_bytes;  // pairs of a token and an expert; bytes of the experts that a job needed
    uint64_t moe_ns, waiting_ns;         // waiting: from an answer to the next ring, while armed
    uint64_t experts, foreseen;          // of jobs, and how many of these were foreseen
    uint64_t gaps, gap_ns;               // from a layer's experts to those of the next layer
};

class Doorbell {
  public:
    // `layers` and `memory` must outlive it, and nobody may ring any more when it goes.
    Doorbell(std::shared_ptr<Host> host, std::vector<const Experts*> layers, std::byte* memory, DoorbellSize size,
             Way way, const DoorbellService& service);
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    // Before a step that may ring, and when it is over: between the two this thread and the workers do not sleep.
    // Steps may overlap. When the last one is over no worker reads weights or jobs any more, however late one was.
    void arm();
    void disarm();

    // Throws what a job failed with, at every call from then on; or, once, that a job's result was not finite.
    void check();

    // Fails it from outside: whoever waits for an answer stops waiting.
    void fail(int code, const std::string& what);

    // The other side, where that is the CPU: the job with this number is written. Copied jobs that are rung for by
    // flags say their number themselves; if that one was answered there is nothing to do.
    void ring(uint32_t number);
    // Whether `number` was answered, and by flags: whether the next job may be written. False after a failure, or when
    // the time is over.
    bool wait(uint32_t number, int64_t timeout_us);
    // kCalls: the GPU's driver calls these, in the order of the stream.
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
    void look_ahead();
    void look_at_result();
    void count_weights();
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
    std::unique_ptr<ReadAhead> read_ahead_;  // null: nothing is foreseen
    std::vector<int> foreseen_;              // the last time
    uint32_t last_foreseen_ = 0;
    std::vector<Moe> operations_;           // taken in turn: a late worker may still read the former one's
    std::vector<int32_t> ids_;              // of the job: those in the block are gone when the next one comes
    std::vector<bool> used_;                // experts of the job
    int layer_ = kProbeLayer, tokens_ = 0;  // of the job
    size_t turn_ = 0;                       // jobs that used an operation
    Count jobs_{0}, pairs_{0}, weight_bytes_{0}, moe_ns_{0}, waiting_ns_{0}, experts_{0}, foreseen_experts_{0};
    Count gaps_{0}, gap_ns_{0};
    std::chrono::steady_clock::time_point done_at_;  // the last job's experts
    int done_layer_ = kProbeLayer;
    std::atomic<uint32_t> looked_{0};  // number of the last job whose result was looked at
    std::atomic<int> armed_{0};
    std::atomic<bool> stop_{false}, parked_{false};
    mutable std::mutex mutex_;  // of what stands below
    std::condition_variable unparked_;
    std::exception_ptr failure_;
    std::string not_finite_;
    std::thread thread_;
};

}  // namespace proa
