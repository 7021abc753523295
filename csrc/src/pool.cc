#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "subnormals.h"

namespace proa {
namespace {

constexpr int64_t kRedoAfterNs = 50'000;  // about the longest task in decode

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

std::byte* reserve_scratch() {
    void* p = mmap(nullptr, kScratchBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, kScratchBytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(p);
}

bool is_announced(const Phase& phase) { return phase.fetch && phase.begin[phase.nodes] > 0; }

}  // namespace

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    asm volatile("yield");
#endif
}

Phase spread(int tasks, int nodes) {
    Phase phase{};
    phase.nodes = nodes;
    for (int n = 0; n <= nodes; ++n) phase.begin[n] = int(int64_t(tasks) * n / nodes);
    return phase;
}

Phase published(int tasks, int nodes, const void* context, decltype(Phase::publish) publish) {
    Phase phase = spread(tasks, nodes);
    phase.run = nullptr, phase.publish = publish, phase.context = context;
    return phase;
}

Pool::Pool(PoolOptions options)
    : options_(std::move(options)),
      lanes_(std::make_unique<Lane[]>(size_t(options_.lanes))),
      callers_(std::make_unique<Worker[]>(size_t(options_.lanes))) {
    for (Lane& lane : all_lanes()) lane.claims = std::make_unique<std::atomic<uint32_t>[]>(kMaxTasks);
    for (Worker& caller : callers()) prepare(caller);
    for (int node = 1; node < nodes(); ++node)
        if (options_.teams[node].empty()) orphans_.push_back(node);
    for (int node = 0; node < nodes(); ++node) {
        wanted_[node].store(int(options_.teams[node].size()));
        for (const int& cpu : options_.teams[node]) {
            auto worker = std::make_unique<Worker>();
            worker->node = node, worker->cpu = cpu, worker->rank = int(&cpu - options_.teams[node].data());
            prepare(*worker);
            workers_.push_back(std::move(worker));
        }
    }
    threads_.store(int(workers_.size()) + 1);
    try {
        for (auto& worker : workers_) start(*worker);
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

// Ends the workers that have been started.
void Pool::end() {
    stop_.store(true);
    wake();
    gate_.fetch_add(1);
    gate_.notify_all();
    for (auto& worker : workers_)
        if (worker->thread.joinable()) worker->thread.join();
}

Pool::Worker::~Worker() {
    if (scratch) munmap(scratch, kScratchBytes);
}

void Pool::prepare(Worker& worker) const {
    worker.scratch = reserve_scratch();
    worker.on = std::make_unique<OnLane[]>(size_t(lanes()));
}

void Pool::start(Worker& worker) {
    worker.alive.store(true);
    try {
        if (options_.starting_for_test) options_.starting_for_test();
        worker.thread = std::thread([this, &worker] { serve(worker); });
    } catch (const std::system_error& error) {
        throw Error(PROA_ERROR_SYSTEM, "The system refused to start one of " + std::to_string(workers_.size()) +
                                           " worker threads: " + error.code().message() +
                                           ". Raise its limit of threads (ulimit -u; of a container pids.max, for "
                                           "Docker --pids-limit), or use fewer: --threads.");
    }
    if (!options_.pin || worker.cpu < 0) return;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    std::string which = "CPU " + std::to_string(worker.cpu);
    if (options_.homes.empty()) {
        CPU_SET(worker.cpu, &cpus);
    } else {
        for (int cpu : options_.homes[size_t(worker.node)]) CPU_SET(cpu, &cpus);
        which = "the CPUs of team " + std::to_string(worker.node);
    }
    if (const int error = pthread_setaffinity_np(worker.thread.native_handle(), sizeof cpus, &cpus))
        unbound_ = "A worker thread could not be bound to " + which + ": " + std::strerror(error) + ".";
}

void Pool::run(const Phase& phase, int lane_index, const Phase* then) {
    if (phase.begin[phase.nodes] == 0) return;
    Lane& lane = lanes_[size_t(lane_index)];
    check(phase);
    if (then) check(*then);
    if (!lane.announced) take_lane(lane);
    [[maybe_unused]] const FlushSubnormals flush;
    open(lane, phase);
    lane.announced = then && is_announced(*then);
    if (lane.announced) post(lane, *then, after(lane.epoch.load(std::memory_order_relaxed)));
    if (asleep_.load(std::memory_order_seq_cst)) wake();
    try {
        finish(lane_index, callers_[size_t(lane_index)]);
    } catch (...) {
        close(lane);
        abandon(lane);
        throw;
    }
    close(lane);
    if (!lane.announced) lane.busy.store(false, std::memory_order_release);
}

void Pool::announce(const Phase& phase, int lane_index) {
    if (!is_announced(phase)) return;
    Lane& lane = lanes_[size_t(lane_index)];
    check(phase);
    take_lane(lane);
    post(lane, phase, after(lane.epoch.load(std::memory_order_relaxed)));
    lane.announced = true;
    if (asleep_.load(std::memory_order_seq_cst)) wake();
}

void Pool::check(const Phase& phase) const {
    if (phase.begin[phase.nodes] > kMaxTasks || phase.nodes > nodes())
        throw Error(PROA_ERROR_ARGUMENT, "A phase must have at most 2^20 tasks, and at most the nodes of the pool.");
}

void Pool::take_lane(Lane& lane) {
    check_alive();
    if (lane.busy.exchange(true))
        throw Error(PROA_ERROR_ARGUMENT, "This lane of the pool is in use by another thread.");
}

void Pool::post(const Phase& phase) {
    check(phase);
    withdraw();
    open(idle_, phase);
}

void Pool::withdraw() { empty(idle_); }

void Pool::run_alone(const Phase& phase, int lane_index) {
    [[maybe_unused]] const FlushSubnormals flush;
    std::byte* scratch = callers_[size_t(lane_index)].scratch;
    const int tasks = phase.begin[phase.nodes];
    for (int task = 0; task < tasks; ++task) {
        if (phase.run_before)
            phase.run_before(phase.context, task, task + 1 < tasks ? task + 1 : -1, scratch);
        else if (phase.run)
            phase.run(phase.context, task, scratch);
        if (phase.publish) phase.publish(phase.context, task, scratch);
    }
}

// Ends a lane's phases after an error: no worker starts another task of the open or the announced one. Returns when no
// worker is inside a task.
void Pool::abandon(Lane& lane) {
    empty(lane);
    lane.done.store(0), lane.tasks.store(0);
    lane.epoch.store(after(after(lane.epoch.load(std::memory_order_relaxed))), std::memory_order_seq_cst);
    lane.announced = false;
    settle();
    lane.busy.store(false);
}

// Works until every task of the lane's phase is published.
void Pool::finish(int lane_index, Worker& self) {
    Lane& lane = lanes_[size_t(lane_index)];
    Task task;
    int64_t waiting_since = 0;
    for (int spins = 0;; ++spins) {
        if (next_task(lane_index, self, task)) {
            execute(lane, task, self);
            waiting_since = 0;
            continue;
        }
        if (lane.done.load(std::memory_order_acquire) >= lane.tasks.load(std::memory_order_relaxed)) return;
        if (lane.announced && fetch_early(lane_index, self)) continue;
        relax();
        if (spins % 64) continue;
        if (!waiting_since) waiting_since = now_ns();
        if (redo(lane, self, waiting_since)) check_alive();
    }
}

// Repeats a task that has been running for much longer than this thread's own tasks take. False if it is too early for
// that.
bool Pool::redo(Lane& lane, Worker& self, int64_t waiting_since_ns) {
    if (now_ns() - waiting_since_ns < std::max(kRedoAfterNs, 2 * self.longest_ns)) return false;
    Task task;
    if (options_.redo && take_again(lane, self.node, task)) {
        execute(lane, task, self);
        redone_.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
}

// Takes a task of the announced phase and prefetches for it, until that phase is opened, or the open one or a lane of
// higher priority has work. False if there is no such task.
bool Pool::hold(int lane_index, Worker& worker) {
    Lane& lane = lanes_[size_t(lane_index)];
    const Task& queued = worker.on[size_t(lane_index)].queued;
    if (!queued.tasks && !fetch_early(lane_index, worker)) return false;
    const uint32_t epoch = queued.epoch;
    int64_t waiting_since = 0;
    for (int spins = 0; after(lane.epoch.load(std::memory_order_acquire)) == epoch; ++spins) {
        if (fetch_early(lane_index, worker)) continue;
        relax();
        // The open phase may have been opened after this worker looked for tasks of it. If this is its node's only
        // worker, no other thread may take that node's tasks.
        if (any_open(lane, worker.node)) break;
        const auto before = all_lanes().first(size_t(lane_index));
        if (std::any_of(before.begin(), before.end(), [&](const Lane& first) { return any_work(first, worker.node); }))
            break;
        if (spins % 64) continue;
        if (stop_.load(std::memory_order_relaxed) || kill_.load(std::memory_order_relaxed)) break;
        if (!waiting_since) waiting_since = now_ns();
        redo(lane, worker, waiting_since);
    }
    return true;
}

void Pool::execute(Lane& lane, const Task& task, Worker& self) {
    if (options_.taken_for_test) options_.taken_for_test();
    std::atomic<uint32_t>& claimed = lane.claimed(task.id);
    uint32_t before = claimed.load(std::memory_order_acquire);
    // If another thread publishes the task after this check, the compare-exchange below fails.
    if (is_over(lane, task)) return;
    const int64_t begin = now_ns();
    if (task.run_before)
        task.run_before(task.context, task.id, task.next, self.scratch);
    else if (task.run)
        task.run(task.context, task.id, self.scratch);
    self.longest_ns = std::max(now_ns() - begin, self.longest_ns - self.longest_ns / 8);
    if (!claimed.compare_exchange_strong(before, task.epoch + 1, std::memory_order_acq_rel)) return;
    if (task.publish) task.publish(task.context, task.id, self.scratch);
    lane.done.fetch_add(1, std::memory_order_release);
}

void Pool::lower_priority() const {
    [[maybe_unused]] const int now = nice(options_.nice);  // of this thread alone, on Linux
}

void Pool::serve(Worker& worker) {
    lower_priority();
    [[maybe_unused]] const FlushSubnormals flush;
    int64_t idle_since = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        if (kill_.load(std::memory_order_relaxed) && kill_.exchange(false)) break;
        if (!wanted(worker)) {
            rest(worker);
            idle_since = 0;
            continue;
        }
        worker.inside.store(true, std::memory_order_seq_cst);
        const bool worked = serve_once(worker, idle_since);
        worker.inside.store(false, std::memory_order_release);
        if (worked) {
            idle_since = 0;
        } else {
            if (!idle_since) idle_since = now_ns();
            idle(worker, idle_since);
        }
    }
    worker.alive.store(false);
}

// Runs one task: of the first lane that has one; else prefetches for an announced phase, until it opens; else runs a
// task that was posted for idle workers; else repeats a task that has been running for too long on another thread.
// Returns whether it did any of the first three.
bool Pool::serve_once(Worker& worker, int64_t idle_since_ns) {
    Task task;
    for (int lane = 0; lane < lanes(); ++lane)
        if (next_task(lane, worker, task)) {
            execute(lanes_[size_t(lane)], task, worker);
            return true;
        }
    for (int lane = 0; lane < lanes(); ++lane)
        if (hold(lane, worker)) return true;
    if (take(idle_, worker.node, task)) {
        task.run(task.context, task.id, worker.scratch);
        return true;
    }
    for (Lane& lane : all_lanes())
        if (idle_since_ns && lane.done.load(std::memory_order_relaxed) < lane.tasks.load(std::memory_order_relaxed))
            redo(lane, worker, idle_since_ns);
    return false;
}

bool Pool::any_work(int node) const {
    const auto every = all_lanes();
    return std::any_of(every.begin(), every.end(), [&](const Lane& lane) { return any_work(lane, node); }) ||
           any_work(idle_, node);
}

// Spins a while, then sleeps until the next phase.
void Pool::idle(Worker& worker, int64_t since_ns) {
    for (int i = 0; i < 256; ++i) {
        if (any_work(worker.node) || stop_.load(std::memory_order_relaxed)) return;
        relax();
    }
    if (now_ns() - since_ns < int64_t(options_.spin_us) * 1000) return;
    if (awake_.load(std::memory_order_relaxed) > 0) return std::this_thread::yield();
    const uint32_t before = bell_.load(std::memory_order_seq_cst);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    if (!any_work(worker.node) && !stop_.load() && !kill_.load() && awake_.load(std::memory_order_seq_cst) <= 0)
        bell_.wait(before, std::memory_order_seq_cst);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
}

bool Pool::wanted(const Worker& worker) const {
    return worker.rank < wanted_[worker.node].load(std::memory_order_seq_cst);
}

// Sleeps until the number of active workers changes; on a futex of its own, so that phases do not wake it.
void Pool::rest(const Worker& worker) {
    const uint32_t before = gate_.load(std::memory_order_seq_cst);
    if (!wanted(worker) && !stop_.load() && !kill_.load()) gate_.wait(before, std::memory_order_seq_cst);
}

void Pool::use(const std::vector<int>& workers) {
    require(int(workers.size()) == nodes(), "There must be one number of workers for each team.");
    for (int node = 0; node < nodes(); ++node) {
        const int all = int(options_.teams[size_t(node)].size()), least = node > 0 && all > 0;
        require(workers[size_t(node)] >= least && workers[size_t(node)] <= all,
                "A team must use 0 to all of its workers, and at least 1 unless it is the caller's.");
    }
    int threads = 1;
    for (int node = 0; node < nodes(); ++node) {
        wanted_[node].store(workers[size_t(node)], std::memory_order_seq_cst);
        threads += workers[size_t(node)];
    }
    threads_.store(threads, std::memory_order_relaxed);
    gate_.fetch_add(1, std::memory_order_seq_cst);
    gate_.notify_all();
}

void Pool::keep_awake() {
    awake_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) wake();
}

void Pool::wake() {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    bell_.notify_all();
}

void Pool::settle() {
    for (auto& worker : workers_)
        while (worker->inside.load(std::memory_order_seq_cst)) relax();
}

void Pool::check_bound() const {
    if (!unbound_.empty()) throw Error(PROA_ERROR_SYSTEM, unbound_);
}

void Pool::check_alive() const {
    for (const auto& worker : workers_)
        if (!worker->alive.load(std::memory_order_acquire))
            throw WorkerDied("A worker thread of the CPU pool on CPU " + std::to_string(worker->cpu) + " has ended.");
}

}  // namespace proa
