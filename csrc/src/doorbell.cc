#include "doorbell.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace proa {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWord = 64;  // a cache line per word: the two sides write different lines
constexpr uint64_t kNumber = 0xffffffff;
constexpr size_t kOperations = 16, kMostOfJob = 2;  // operations; the most that a job uses
constexpr int64_t kWaitUs = 1'000'000;
constexpr auto kLongestPark = std::chrono::milliseconds(20);  // then it checks for a ring without arming

int64_t lines(int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

uint64_t ns_between(Clock::time_point begin, Clock::time_point end) {
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count());
}

uint64_t ns_since(Clock::time_point begin) { return ns_between(begin, Clock::now()); }

constexpr int64_t kAlone = 1 << 16;  // elements of a result; with more, all workers check it or add to it

// Returns the first row of y with a non-finite value, or -1. Adding one to an exponent of all ones carries into the
// sign.
int first_not_finite(const float* y, int rows, int columns) {
    for (int row = 0; row < rows; ++row, y += columns) {
        uint32_t carried = 0;
        for (int i = 0; i < columns; ++i) {
            uint32_t bits;
            std::memcpy(&bits, y + i, sizeof bits);
            carried |= (bits & 0x7f800000) + 0x00800000;
        }
        if (carried >> 31) return row;
    }
    return -1;
}

struct Look {
    const float* y;
    int rows, columns, tasks;
    mutable std::atomic<int> first;  // first row found so far; `rows` if none

    void at(int begin, int end) const {
        const int found = first_not_finite(y + size_t(begin) * size_t(columns), end - begin, columns);
        int before = first.load(std::memory_order_relaxed);
        while (found >= 0 && begin + found < before && !first.compare_exchange_weak(before, begin + found)) {
        }
    }
};

// Adds rows of the deferred experts' sum.
struct Sum {
    const float* more;
    float* y;
    int rows, columns, tasks;

    void at(int begin, int end) const {
        for (size_t i = size_t(begin) * size_t(columns); i < size_t(end) * size_t(columns); ++i) y[i] += more[i];
    }
};

// Calls `work.at` for all rows, on all workers if there are many elements.
template <class Work>
void over_rows(const Work& work, Pool& pool, int lane) {
    if (int64_t(work.rows) * work.columns <= kAlone) return work.at(0, work.rows);
    const auto part = [](const void* context, int task, const std::byte*) {
        const Work& w = *static_cast<const Work*>(context);
        w.at(block_begin(w.rows, w.tasks, task), block_begin(w.rows, w.tasks, task + 1));
    };
    pool.run(published(work.tasks, pool.nodes(), &work, part), lane);
}

void add(std::atomic<uint64_t>& count, uint64_t more) { count.fetch_add(more, std::memory_order_relaxed); }

}  // namespace

DoorbellLayout doorbell_layout(int most_tokens, int top_k, int hidden) {
    const int64_t pairs = int64_t(most_tokens) * top_k, values = int64_t(most_tokens) * hidden;
    DoorbellLayout l{};
    l.rung = 0;
    l.answered = kWord, l.dead = kWord + 4, l.done = kWord + 8, l.ready = kWord + 12;
    l.foreseen = 2 * kWord, l.foreseen_layer = l.foreseen + 4, l.foreseen_rows = l.foreseen + 8;
    l.foreseen_ids = 3 * kWord;
    l.header = l.foreseen_ids + lines(int64_t(kForeseenRows) * top_k * 4);
    l.ids = l.header + kWord;
    l.weights = l.ids + lines(pairs * 4);
    l.x = l.weights + lines(pairs * 4);
    l.y = l.x + lines(values * 2);
    l.bytes = l.y + lines(values * 4);
    return l;
}

Doorbell::Doorbell(std::shared_ptr<Host> host, std::vector<const Experts*> layers, std::byte* memory, DoorbellSize size,
                   Way way, const DoorbellService& service)
    : host_(std::move(host)),
      layers_(std::move(layers)),
      memory_(memory),
      size_(size),
      layout_(doorbell_layout(size.most_tokens, size.top_k, size.hidden)),
      way_(way),
      lane_(service.lane),
      spin_us_(service.spin_us),
      decode_tokens_(service.decode_tokens),
      read_ahead_(service.read_ahead ? std::make_unique<ReadAhead>(*host_) : nullptr),
      operations_(kOperations),
      deferral_(service.deferred, int(layers_.size()) - 1, size.most_tokens, size.top_k, size.hidden) {
    std::memset(memory_, 0, size_t(layout_.ids));
    flag(layout_.ready).store(kFlag);
    ids_.reserve(size_t(size.most_tokens) * size_t(size.top_k));
    thread_ = std::thread([this] { serve(); });
    try {
        bind(service.cpus);
    } catch (...) {
        stop_.store(true);
        unpark();
        thread_.join();
        throw;
    }
}

Doorbell::~Doorbell() {
    fail(PROA_ERROR_SYSTEM, "The doorbell was closed.");
    stop_.store(true, std::memory_order_seq_cst);
    unpark();
    thread_.join();
    host_->pool.settle();
    while (armed_.load() > 0) disarm();
}

void Doorbell::bind(const std::vector<int>& cpus) {
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    if (const int error = pthread_setaffinity_np(thread_.native_handle(), sizeof set, &set))
        throw Error(PROA_ERROR_SYSTEM,
                    std::string("The doorbell's thread could not be bound to its CPUs: ") + std::strerror(error) + ".");
}

std::atomic_ref<uint32_t> Doorbell::rung() const { return std::atomic_ref<uint32_t>(*at<uint32_t>(layout_.rung)); }
std::atomic_ref<uint64_t> Doorbell::answer() const {
    return std::atomic_ref<uint64_t>(*at<uint64_t>(layout_.answered));
}

void Doorbell::arm() {
    armed_.fetch_add(1, std::memory_order_seq_cst);
    host_->pool.keep_awake();
    if (parked_.load(std::memory_order_seq_cst)) unpark();
}

void Doorbell::disarm() {
    int before = armed_.load();
    while (before > 0 && !armed_.compare_exchange_weak(before, before - 1)) {
    }
    require(before > 0, "The doorbell is not armed.");
    host_->pool.let_sleep();
    if (before == 1) host_->pool.settle();
}

void Doorbell::unpark() {
    const std::lock_guard lock(mutex_);
    unparked_.notify_all();
}

// Sleeps until a step is armed, for at most kLongestPark.
void Doorbell::park() {
    std::unique_lock lock(mutex_);
    parked_.store(true, std::memory_order_seq_cst);
    unparked_.wait_until(lock, std::chrono::system_clock::now() + kLongestPark,
                         [this] { return armed_.load(std::memory_order_seq_cst) > 0 || stop_.load(); });
    parked_.store(false, std::memory_order_relaxed);
}

void Doorbell::check() {
    // The doorbell's thread checks a result immediately after its answer, so this loop ends soon.
    while (!dead() && looked_.load(std::memory_order_acquire) != uint32_t(answer().load(std::memory_order_acquire)))
        relax();
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    host_->pool.check_alive();  // each job checks this too, but a step may have had no job
    if (not_finite_.empty()) return;
    const std::string what = std::exchange(not_finite_, {});
    throw Error(PROA_ERROR_NUMERICS, what);
}

void Doorbell::fail(int code, const std::string& what) {
    {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::make_exception_ptr(Error(code, what));
    }
    for (int64_t each : {layout_.done, layout_.ready}) flag(each).fetch_or(kFailed, std::memory_order_acq_rel);
    answer().fetch_or(uint64_t(uint32_t(code)) << 32, std::memory_order_acq_rel);
}

void Doorbell::ring(uint32_t number) { rung().store(way_ == Way::kFlags ? kFlag : number, std::memory_order_release); }

bool Doorbell::wait(uint32_t number, int64_t timeout_us) {
    if (way_ != Way::kFlags)
        return wait_until([&] { return (answer().load(std::memory_order_acquire) & kNumber) == number; }, timeout_us);
    const auto is_up = [this](int64_t which) { return flag(which).load(std::memory_order_acquire) & kFlag; };
    if (!wait_until([&] { return is_up(layout_.done); }, timeout_us)) return false;
    rung().store(0, std::memory_order_release);
    return wait_until([&] { return is_up(layout_.ready); }, timeout_us);
}

// Waits without a timeout: a failure ends it.
void Doorbell::wait_copied() {
    while (!dead() && !wait(rung().load(std::memory_order_acquire), kWaitUs)) {
    }
}

// Waits until `seen` is true; false after a failure or the timeout.
template <class Seen>
bool Doorbell::wait_until(const Seen& seen, int64_t timeout_us) const {
    const auto begin = Clock::now();
    for (int spins = 0;; ++spins) {
        if (dead()) return false;
        if (seen()) return true;
        relax();
        if (spins % 64) continue;
        if (ns_since(begin) > uint64_t(timeout_us) * 1000) return false;
        if (spins % 4096 == 0) std::this_thread::yield();  // with few cores, the answering thread needs this core
    }
}

DoorbellCounters Doorbell::counters() const {
    const auto of = [](const Count& count) { return count.load(std::memory_order_relaxed); };
    return {of(jobs_),       of(pairs_),    of(weight_bytes_),     of(moe_ns_),
            of(waiting_ns_), of(experts_),  of(foreseen_experts_), of(gaps_),
            of(gap_ns_),     of(deferred_), of(deferred_ns_)};
}

void Doorbell::serve() {
    host_->pool.lower_priority();
    auto idle_since = Clock::now();
    uint32_t last = 0;
    for (int spins = 1; !stop_.load(std::memory_order_relaxed); ++spins) {
        const uint32_t rang = rung().load(std::memory_order_acquire);
        const uint32_t number = way_ == Way::kFlags ? flagged_number(rang, last) : rang;
        const bool armed = armed_.load(std::memory_order_relaxed) > 0;  // a step is armed before it rings
        if (number != last) {
            if (!armed) fail(PROA_ERROR_ARGUMENT, "A step rang the doorbell while none was armed.");
            add(waiting_ns_, ns_since(idle_since));
            if (read_ahead_) read_ahead_->end();
            if (!dead()) answer_job(number);
            last = number;
            idle_since = Clock::now();
            continue;
        }
        if (way_ == Way::kFlags) answer_flags(rang == kFlag);
        if (read_ahead_ && armed) look_ahead();
        relax();
        if (spins % 4096 == 0) std::this_thread::yield();  // with few cores, other threads need this core
        if (armed || spins % 64 || ns_since(idle_since) < uint64_t(spin_us_) * 1000) continue;
        park();
        if (armed_.load(std::memory_order_relaxed) > 0) idle_since = Clock::now();
    }
}

// After a failure the GPU does not wait before it copies the next job, so the number in the block is not read.
uint32_t Doorbell::flagged_number(uint32_t rang, uint32_t last) const {
    return rang == kFlag && !dead() ? copied_number() : last;
}

void Doorbell::say_done() {
    flag(layout_.ready).fetch_and(~kFlag, std::memory_order_relaxed);
    flag(layout_.done).fetch_or(kFlag, std::memory_order_release);
}

// Sets `done` when all jobs are answered, and clears it once the GPU has seen it. kFailed, which `fail` sets, is kept.
void Doorbell::answer_flags(bool rings) {
    const bool done = flag(layout_.done).load(std::memory_order_relaxed) & kFlag;
    if (rings && !done) say_done();
    if (rings || !done) return;
    flag(layout_.done).fetch_and(~kFlag, std::memory_order_relaxed);
    flag(layout_.ready).fetch_or(kFlag, std::memory_order_release);
}

// Answers first. Then it checks the result for NaN and infinity and computes deferred experts, before the next job: the
// GPU goes on meanwhile.
void Doorbell::answer_job(uint32_t number) {
    const int32_t* header = at<int32_t>(layout_.header);
    try {
        if (number != looked_.load(std::memory_order_relaxed) + 1)
            throw Error(PROA_ERROR_ARGUMENT, "The doorbell was rung with number " + std::to_string(number) +
                                                 " after number " + std::to_string(looked_.load()) +
                                                 "; numbers must increase by 1.");
        run(header);
        uint64_t before = answer().load(std::memory_order_relaxed);
        while (!answer().compare_exchange_weak(before, (before & ~kNumber) | number, std::memory_order_acq_rel)) {
        }
        if (way_ == Way::kFlags) say_done();
        if (layer_ != kProbeLayer) {
            if (deferral_.owes_finite()) look_at(at<float>(layout_.y), ids_);  // else it was reported with its layer
            deferral_.paid();
            count_weights(ids_);
            add(jobs_, 1);
            if (deferral_.has_pairs()) run_deferred();
            if (turn_ - settled_ > kOperations - kMostOfJob) host_->pool.settle(), settled_ = turn_;
        }
        looked_.store(number, std::memory_order_release);
    } catch (const Error& error) {
        fail(error.code(), error.what());
    } catch (const std::exception& error) {
        fail(PROA_ERROR_SYSTEM, error.what());
    }
}

void Doorbell::run(const int32_t* header) {
    const bool decode = header[0] >= kDecodeJob;
    layer_ = decode ? header[0] - kDecodeJob : header[0], tokens_ = header[1];
    if (layer_ == kProbeLayer) return;
    if (layer_ < 0 || layer_ >= int(layers_.size()))
        throw Error(PROA_ERROR_ARGUMENT, "A job has layer " + std::to_string(layer_) + ", but there are " +
                                             std::to_string(layers_.size()) + " layers.");
    if (tokens_ < 1 || tokens_ > size_.most_tokens)
        throw Error(PROA_ERROR_ARGUMENT, "A job has " + std::to_string(tokens_) + " tokens; 1 to " +
                                             std::to_string(size_.most_tokens) + " are possible.");
    const auto begin = Clock::now();
    if (done_layer_ >= 0 && layer_ == done_layer_ + 1) add(gaps_, 1), add(gap_ns_, ns_between(done_at_, begin));
    deferral_.begin(layer_, tokens_, decode);
    const bool copied = way_ != Way::kNumber;
    const DoorbellLayout l = copied ? doorbell_layout(tokens_, size_.top_k, size_.hidden) : layout_;
    const int32_t* ids = at<int32_t>(l.ids);
    ids_.assign(ids, ids + size_t(tokens_) * size_t(size_.top_k));
    deferral_.take(ids_, at<float>(l.weights), at<uint16_t>(l.x));
    float* y = at<float>(layout_.y);
    compute(ids_, at<float>(l.weights), at<uint16_t>(l.x), y);
    if (const float* owed = deferral_.owed())
        over_rows(Sum{owed, y, tokens_, size_.hidden, std::min(tokens_, host_->pool.threads())}, host_->pool, lane_);
    done_at_ = Clock::now(), done_layer_ = layer_;
    add(moe_ns_, ns_between(begin, done_at_));
}

// Computes the job's deferred pairs; their sum is added to the next answer.
void Doorbell::run_deferred() {
    const auto begin = Clock::now();
    compute(deferral_.ids(), deferral_.weights(), deferral_.x(), deferral_.y());
    const uint64_t took_ns = ns_since(begin);
    add(moe_ns_, took_ns), add(deferred_ns_, took_ns);
    add(deferred_, count_weights(deferral_.ids()));
    deferral_.computed(look_at(deferral_.y(), deferral_.ids()));
}

// Computes these pairs of the job. Of a decode step's job all pairs may be on the GPU, or deferred.
void Doorbell::compute(const std::vector<int32_t>& ids, const float* weights, const uint16_t* x, float* y) {
    if (std::all_of(ids.begin(), ids.end(), [](int32_t id) { return id == -1; })) {
        std::fill_n(y, size_t(tokens_) * size_t(size_.hidden), 0.f);
        return;
    }
    Moe& op = operations_[turn_ % kOperations];
    op.experts = layers_[size_t(layer_)];
    op.top_k = size_.top_k, op.ids = ids.data(), op.weights = weights;
    op.x = x, op.x_stride = size_.hidden;
    op.y = y, op.y_stride = size_.hidden, op.wide = true;
    op.ahead = read_ahead_ ? read_ahead_->of(*op.experts) : nullptr;
    host_->regimes[size_t(lane_)] = tokens_ <= decode_tokens_ ? Regime::kDecode : Regime::kByRows;
    proa::run(op, *host_, tokens_, lane_);
    ++turn_;
}

// Lets idle workers read the predicted experts' weights. If this runs late, the ids may be those of another layer: the
// GPU does not wait for it.
void Doorbell::look_ahead() {
    const uint32_t number = std::atomic_ref<uint32_t>(*at<uint32_t>(layout_.foreseen)).load(std::memory_order_acquire);
    if (number == last_foreseen_) return;
    last_foreseen_ = number;
    const auto word = [this](int64_t offset) {
        return std::atomic_ref<int32_t>(*at<int32_t>(offset)).load(std::memory_order_relaxed);
    };
    const int layer = word(layout_.foreseen_layer), rows = word(layout_.foreseen_rows);
    if (layer < 0 || layer >= int(layers_.size()) || layer == layer_ || rows < 1 || rows > kForeseenRows) return;
    const Experts& experts = *layers_[size_t(layer)];
    foreseen_.clear();
    for (int k = 0; k < size_.top_k; ++k)
        for (int row = 0; row < rows; ++row) {
            const int id = word(layout_.foreseen_ids + int64_t(row * size_.top_k + k) * 4);
            if (id < 0 || id >= experts.gate_up->count) continue;
            if (std::find(foreseen_.begin(), foreseen_.end(), id) == foreseen_.end()) foreseen_.push_back(id);
        }
    read_ahead_->begin(experts, foreseen_);
}

// Notes the first non-finite row of a result; returns true if there is none.
bool Doorbell::look_at(const float* y, const std::vector<int32_t>& ids) {
    const Look look{y, tokens_, size_.hidden, std::min(tokens_, host_->pool.threads()), tokens_};
    over_rows(look, host_->pool, lane_);
    const int row = look.first.load();
    if (row == tokens_) return true;
    std::string experts;
    for (int k = 0; k < size_.top_k; ++k) {
        const int id = ids[size_t(row) * size_t(size_.top_k) + size_t(k)];
        if (id >= 0) experts += (experts.empty() ? "" : ", ") + std::to_string(id);
    }
    const std::lock_guard lock(mutex_);
    if (not_finite_.empty())
        not_finite_ = "The experts' sum is non-finite (NaN or Inf): layer " + std::to_string(layer_) + ", row " +
                      std::to_string(row) + " of " + std::to_string(tokens_) + ", experts " + experts + ".";
    return false;
}

// Returns the number of pairs.
uint64_t Doorbell::count_weights(const std::vector<int32_t>& ids) {
    const Experts& e = *layers_[size_t(layer_)];
    used_.assign(size_t(e.gate_up->count), false);
    uint64_t pairs = 0, experts = 0;
    for (int id : ids) {
        if (id < 0) continue;
        ++pairs;
        experts += !used_[size_t(id)];
        used_[size_t(id)] = true;
    }
    add(pairs_, pairs), add(weight_bytes_, experts * (e.gate_up->matrix_bytes() + e.down->matrix_bytes()));
    add(experts_, experts);
    if (read_ahead_ && read_ahead_->of(e))
        add(foreseen_experts_,
            uint64_t(std::count_if(foreseen_.begin(), foreseen_.end(), [this](int id) { return used_[size_t(id)]; })));
    return pairs;
}

}  // namespace proa
