#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "subnormals.h"

namespace proa {
namespace {

constexpr int kIndexBits = 20;
constexpr uint64_t kIndexMask = (uint64_t(1) << kIndexBits) - 1;
constexpr uint64_t kEpochMask = (uint64_t(1) << 24) - 1;
constexpr int kManyLeft = 2;  // tasks for each worker
constexpr size_t kAllSeen = ~size_t(0);
constexpr int64_t kRedoAfterNs = 50'000;  // a task takes at most about that long while decoding

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

Pool::Pool(PoolOptions options) : options_(std::move(options)) {
    for (Lane& lane : lanes_) lane.claimed = std::make_unique<std::atomic<uint32_t>[]>(kMaxTasks);
    for (Worker& caller : callers_) caller.scratch = reserve_scratch();
    for (int node = 1; node < nodes(); ++node)
        if (options_.teams[node].empty()) orphans_.push_back(node);
    for (int node = 0; node < nodes(); ++node) {
        wanted_[node].store(int(options_.teams[node].size()));
        for (const int& cpu : options_.teams[node]) {
            auto worker = std::make_unique<Worker>();
            worker->node = node, worker->cpu = cpu, worker->rank = int(&cpu - options_.teams[node].data());
            worker->scratch = reserve_scratch();
            workers_.push_back(std::move(worker));
        }
    }
    threads_.store(int(workers_.size()) + 1);
    for (auto& worker : workers_) start(*worker);
}

void Pool::start(Worker& worker) {
    worker.alive.store(true);
    worker.thread = std::thread([this, &worker] { serve(worker); });
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

Pool::~Pool() {
    stop_.store(true);
    wake();
    gate_.fetch_add(1);
    gate_.notify_all();
    for (auto& worker : workers_) {
        worker->thread.join();
        munmap(worker->scratch, kScratchBytes);
    }
    for (Worker& caller : callers_) munmap(caller.scratch, kScratchBytes);
}

void Pool::run(const Phase& phase, int lane_index) {
    const int tasks = phase.begin[phase.nodes];
    if (tasks == 0) return;
    if (tasks > kMaxTasks || phase.nodes > nodes())
        throw Error(PROA_ERROR_ARGUMENT, "A phase has too many tasks or nodes.");
    check_alive();
    Lane& lane = lanes_[lane_index];
    if (lane.busy.exchange(true))
        throw Error(PROA_ERROR_ARGUMENT, "This lane of the pool is in use by another thread.");
    [[maybe_unused]] const FlushSubnormals flush;
    lane.done.store(0, std::memory_order_relaxed);
    lane.tasks.store(tasks, std::memory_order_relaxed);
    hand_out(lane, phase);
    if (asleep_.load(std::memory_order_seq_cst)) wake();
    try {
        finish(lane_index, callers_[lane_index]);
    } catch (...) {
        close(lane);
        abandon(lane);
        throw;
    }
    close(lane);
    lane.busy.store(false, std::memory_order_release);
}

// From here on workers find its tasks.
void Pool::hand_out(Lane& lane, const Phase& phase) {
    const uint64_t epoch = (lane.epoch.load(std::memory_order_relaxed) + 1) & kEpochMask;
    Posted& posted = lane.posted[epoch & 1];
    posted.epoch.store(~uint64_t(0), std::memory_order_seq_cst);
    posted.run.store(phase.run, std::memory_order_release);  // not before the epoch is gone
    posted.run_before.store(phase.run_before, std::memory_order_release);
    posted.publish.store(phase.publish, std::memory_order_release);
    posted.context.store(phase.context, std::memory_order_release);
    posted.tasks.store(phase.begin[phase.nodes], std::memory_order_release);
    posted.at_home.store(phase.at_home, std::memory_order_release);
    posted.handing.store(phase.handing, std::memory_order_release);
    for (int n = 0; n <= phase.nodes; ++n) posted.begin[n].store(phase.begin[n], std::memory_order_release);
    posted.epoch.store(epoch, std::memory_order_release);
    lane.epoch.store(epoch, std::memory_order_release);
    for (int n = 0; n < phase.nodes; ++n) {
        const uint64_t count = uint64_t(phase.begin[n + 1] - phase.begin[n]);
        lane.next[n].value.store(epoch << 40 | count << kIndexBits, std::memory_order_seq_cst);
    }
}

// Who looks from now on finds nothing that belongs to the phase's caller; who is looking is inside, see settle().
void Pool::close(Lane& lane) {
    lane.posted[lane.epoch.load(std::memory_order_relaxed) & 1].handing.store(nullptr, std::memory_order_seq_cst);
}

void Pool::post(const Phase& phase) {
    if (phase.begin[phase.nodes] > kMaxTasks || phase.nodes > nodes())
        throw Error(PROA_ERROR_ARGUMENT, "A phase has too many tasks or nodes.");
    hand_out(idle_, phase);
}

void Pool::withdraw() {
    for (Counter& counter : idle_.next) counter.value.store(0, std::memory_order_seq_cst);
}

void Pool::run_alone(const Phase& phase, int lane_index) {
    [[maybe_unused]] const FlushSubnormals flush;
    std::byte* scratch = callers_[lane_index].scratch;
    const int tasks = phase.begin[phase.nodes];
    for (int task = 0; task < tasks; ++task) {
        if (phase.run_before)
            phase.run_before(phase.context, task, task + 1 < tasks ? task + 1 : -1, scratch);
        else if (phase.run)
            phase.run(phase.context, task, scratch);
        if (phase.publish) phase.publish(phase.context, task, scratch);
    }
}

// Nobody may start a task of a phase whose caller leaves with an error.
void Pool::abandon(Lane& lane) {
    for (Counter& counter : lane.next) counter.value.store(0, std::memory_order_seq_cst);
    lane.done.store(0), lane.tasks.store(0);
    settle();
    lane.busy.store(false);
}

// Works until every task of the lane's phase is published.
void Pool::finish(int lane_index, Worker& self) {
    Lane& lane = lanes_[lane_index];
    Task task;
    int64_t waiting_since = 0;
    for (int spins = 0;; ++spins) {
        if (next_task(lane_index, self, task)) {
            execute(lane, task, self);
            waiting_since = 0;
            continue;
        }
        if (lane.done.load(std::memory_order_acquire) >= lane.tasks.load(std::memory_order_relaxed)) return;
        relax();
        if (spins % 64) continue;
        if (!waiting_since) waiting_since = now_ns();
        if (redo(lane, self, waiting_since)) check_alive();
    }
}

// Someone has been at a task for longer than any takes here: do it as well. False where it is too early for that.
bool Pool::redo(Lane& lane, Worker& self, int64_t waiting_since_ns) {
    if (now_ns() - waiting_since_ns < std::max(kRedoAfterNs, 2 * self.longest_ns)) return false;
    Task task;
    if (options_.redo && take_again(lane, self.node, task)) {
        execute(lane, task, self);
        redone_.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
}

bool Pool::look_up(Lane& lane, uint64_t epoch, Task& task) {
    Posted& posted = lane.posted[epoch & 1];
    if (posted.epoch.load(std::memory_order_acquire) != epoch) return false;
    task.run = posted.run.load(std::memory_order_acquire);  // before the epoch is looked at again
    task.run_before = posted.run_before.load(std::memory_order_acquire);
    task.publish = posted.publish.load(std::memory_order_acquire);
    task.context = posted.context.load(std::memory_order_acquire);
    task.tasks = posted.tasks.load(std::memory_order_acquire);
    task.at_home = posted.at_home.load(std::memory_order_acquire);
    task.handing = posted.handing.load(std::memory_order_seq_cst);
    task.epoch = uint32_t(epoch);
    return posted.epoch.load(std::memory_order_relaxed) == epoch;
}

// A task to do now; where tasks prepare the one behind them, that one is taken too, while there are many.
bool Pool::next_task(int lane, Worker& worker, Task& task) {
    Task& queued = worker.queued[lane];
    if (queued.tasks) {
        task = queued;
        queued.tasks = 0;
    } else if (!first_task(lane, worker, task)) {
        return false;
    }
    if (task.run_before && has_many(lanes_[lane], worker.node) && first_task(lane, worker, queued) &&
        queued.epoch == task.epoch)
        task.next = queued.id;
    return true;
}

bool Pool::first_task(int lane, Worker& worker, Task& task) {
    task = Task();
    if (take_owned(lane, worker, task) || take(lanes_[lane], worker.node, task)) return true;
    task.tasks = 0;
    return false;
}

// So many that a task which waits behind another one is not what the phase ends with.
bool Pool::has_many(const Lane& lane, int node) const {
    const uint64_t seen = lane.next[node].value.load(std::memory_order_relaxed);
    const int left = int(seen >> kIndexBits & kIndexMask) - int(seen & kIndexMask);
    return left > kManyLeft * (wanted_[node].load(std::memory_order_relaxed) + 1);
}

bool Pool::take(Lane& lane, int node, Task& task) {
    if (take_of(lane, node, task)) return true;
    for (int orphan : orphans_)
        if (take_of(lane, orphan, task)) return true;
    return false;
}

// The next task of this node. A phase that ended meanwhile is noticed: its epoch is gone.
bool Pool::take_of(Lane& lane, int node, Task& task) {
    std::atomic<uint64_t>& next = lane.next[node].value;
    const uint64_t seen = next.load(std::memory_order_acquire);
    if ((seen & kIndexMask) >= (seen >> kIndexBits & kIndexMask)) return false;
    const uint64_t got = next.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t index = got & kIndexMask;
    if (index >= (got >> kIndexBits & kIndexMask)) return false;
    const uint64_t epoch = got >> 40;
    task.id = lane.posted[epoch & 1].begin[node].load(std::memory_order_acquire) + int(index);
    if (!look_up(lane, epoch, task)) return false;  // only if another worker has done the task and the phase is over
    if (task.handing) task.id = task.handing->order[size_t(task.id)];
    return true;
}

// The next task that is this worker's own.
bool Pool::take_owned(int lane, Worker& worker, Task& task) {
    const uint64_t epoch = lanes_[lane].epoch.load(std::memory_order_acquire);
    size_t& at = worker.looked_at[lane];
    if (worker.looked[lane] != epoch) worker.looked[lane] = epoch, at = 0;
    if (at == kAllSeen) return false;
    if (look_up(lanes_[lane], epoch, task) && task.handing) {
        for (const auto& owned = task.handing->owned; at < owned.size();)
            if (const Handing::Owned& each = owned[at++]; each.scratch == worker.scratch) {
                task.id = each.task;
                return true;
            }
    }
    at = kAllSeen;
    return false;
}

// A task that somebody took and has not published: every node's, since its team may be off its cores.
bool Pool::take_again(Lane& lane, int node, Task& task) {
    const uint64_t epoch = lane.epoch.load(std::memory_order_acquire);
    const int from = lane.posted[epoch & 1].begin[node].load(std::memory_order_acquire);
    if (!look_up(lane, epoch, task) || task.at_home) return false;  // else `from` and everything else are of this epoch
    for (int i = 0; i < task.tasks; ++i) {
        task.id = (from + i) % task.tasks;
        if (lane.claimed[task.id].load(std::memory_order_relaxed) != task.epoch + 1) return true;
    }
    return false;
}

void Pool::execute(Lane& lane, const Task& task, Worker& self) {
    if (options_.taken_for_test) options_.taken_for_test();
    std::atomic<uint32_t>& claimed = lane.claimed[task.id];
    uint32_t before = claimed.load(std::memory_order_acquire);
    // Whoever was off its core since it took the task may find it published, and its number claimed by a later phase:
    // then that phase's epoch is seen here. Otherwise the claim below fails if the task is published meanwhile.
    if (before == task.epoch + 1 || lane.epoch.load(std::memory_order_relaxed) != task.epoch) return;
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

void Pool::serve(Worker& worker) {
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

// One task, of the first lane that has one, or for idle workers; or one that another has been at for too long.
bool Pool::serve_once(Worker& worker, int64_t idle_since_ns) {
    Task task;
    for (int lane = 0; lane < kLanes; ++lane)
        if (next_task(lane, worker, task)) {
            execute(lanes_[lane], task, worker);
            return true;
        }
    if (take(idle_, worker.node, task)) {
        task.run(task.context, task.id, worker.scratch);
        return true;
    }
    for (Lane& lane : lanes_)
        if (idle_since_ns && lane.done.load(std::memory_order_relaxed) < lane.tasks.load(std::memory_order_relaxed))
            redo(lane, worker, idle_since_ns);
    return false;
}

bool Pool::any_work(int node) const {
    const auto waiting = [](const Lane& lane, int n) {
        const uint64_t seen = lane.next[n].value.load(std::memory_order_seq_cst);
        return (seen & kIndexMask) < (seen >> kIndexBits & kIndexMask);
    };
    const auto here = [&](const Lane& lane) {
        return waiting(lane, node) ||
               std::any_of(orphans_.begin(), orphans_.end(), [&](int orphan) { return waiting(lane, orphan); });
    };
    return std::any_of(std::begin(lanes_), std::end(lanes_), here) || here(idle_);
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

// Sleeps until the pool's size changes. Not at the bell: nobody shall be woken for each phase to find nothing to do.
void Pool::rest(const Worker& worker) {
    const uint32_t before = gate_.load(std::memory_order_seq_cst);
    if (!wanted(worker) && !stop_.load() && !kill_.load()) gate_.wait(before, std::memory_order_seq_cst);
}

void Pool::use(const std::vector<int>& workers) {
    require(int(workers.size()) == nodes(), "Each team needs its number of workers.");
    for (int node = 0; node < nodes(); ++node) {
        const int all = int(options_.teams[size_t(node)].size()), least = node > 0 && all > 0;
        require(workers[size_t(node)] >= least && workers[size_t(node)] <= all,
                "A team has no such number of workers.");
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
            throw WorkerDied("a worker thread of the CPU pool on CPU " + std::to_string(worker->cpu) + " has ended");
}

}  // namespace proa
