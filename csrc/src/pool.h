// The thread pool: one team of workers per NUMA node, and the calling thread. Belongs here: scheduling tasks, waiting,
// parking. Never: what a task computes.
//
// Work comes in phases of independent tasks. Each task belongs to a node and is taken by that node's team. A task
// computes into the private scratch of its worker and is published once: if a worker is preempted by the operating
// system, a second one may repeat `run`, and only one of the two may `publish`. So a preempted worker delays a phase by
// a task, not by a time slice.
//
// The phase after the open one may be announced: a worker without tasks takes one of those, and prefetches its inputs
// until the phase is opened. So memory is not idle while the last tasks of a phase run (decision 039).
//
// Each lane carries the phases of one caller. Before every task workers look for work on the lanes in their order, so a
// lane has priority over those after it. A worker that finds no task on any lane runs what was posted for idle workers,
// which no caller waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "error.h"

namespace proa {

// One pause of a spinning thread.
void relax();

constexpr int kMaxNodes = 64;
constexpr size_t kScratchBytes = size_t(256) << 20;  // address space per worker; memory is allocated as it is touched
constexpr int kMaxTasks = 1 << 20;                   // per phase

// Assigns tasks of a phase to the workers that have their weights in cache already.
struct Handing {
    struct Owned {
        const std::byte* scratch;  // identifies the worker
        int task;
    };
    std::vector<Owned> owned;
    std::vector<int32_t> order;  // permutation of the phase's tasks: each node's owned tasks last
};

struct Phase {
    void (*run)(const void* context, int task, std::byte* scratch);
    void (*publish)(const void* context, int task, const std::byte* scratch);
    const void* context;
    // Replaces `run` for short tasks that prefetch for the following one: next is the task that this worker will
    // probably run after this one, or -1.
    void (*run_before)(const void* context, int task, int next, std::byte* scratch) = nullptr;
    int nodes;
    int begin[kMaxNodes + 1];  // node n owns tasks [begin[n], begin[n + 1])
    bool at_home = false;      // tasks are never repeated by another worker
    const Handing* handing = nullptr;
    // Prefetches a part of a task's constant inputs, before its other inputs exist; false: there is no such part.
    bool (*fetch)(const void* context, int task, int part) = nullptr;
};

// A phase whose tasks belong to no particular node: divided evenly over the nodes.
Phase spread(int tasks, int nodes);

// A phase of short tasks that write directly to shared memory in `publish`, and so must not be repeated.
Phase published(int tasks, int nodes, const void* context, decltype(Phase::publish) publish);

struct WorkerDied : Error {
    explicit WorkerDied(const std::string& what) : Error(PROA_ERROR_WORKER, what) {}
};

struct PoolOptions {
    std::vector<std::vector<int>> teams;       // logical CPUs of each node's workers, without the calling thread
    bool pin = true;                           // bind each worker to its CPU,
    std::vector<std::vector<int>> homes = {};  // or, if given, to all CPUs of its team's home
    int spin_us = 1000;                        // how long an idle worker spins before it sleeps
    bool redo = true;                          // repeat tasks of a preempted worker, unless the phase is at_home
    int lanes = 1;                             // callers that may run phases at the same time; at least 1
    int nice = 0;                              // what is added to the workers' nice value
    void (*taken_for_test)() = nullptr;        // called between taking a task and beginning it
    void (*starting_for_test)() = nullptr;     // called before a thread is started; may throw as starting it may
};

class Pool {
  public:
    explicit Pool(PoolOptions options);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int nodes() const { return int(options_.teams.size()); }
    int lanes() const { return options_.lanes; }
    int threads() const {
        return threads_.load(std::memory_order_relaxed);
    }  // active ones, including the calling thread

    // From now on only the first `workers[node]` workers of each team take part; the others sleep. Every team with
    // workers, except the caller's, must keep at least one.
    void use(const std::vector<int>& workers);

    // Runs a phase on a lane and returns when every task is published; the calling thread works too, as a member of
    // node 0. One caller per lane at a time. Throws WorkerDied. Task functions must not throw. then: the lane's next
    // phase, which is announced at once.
    void run(const Phase& phase, int lane = 0, const Phase* then = nullptr);

    // Announces the lane's next phase before its inputs exist. Does nothing if the phase has no `fetch`.
    void announce(const Phase& phase, int lane = 0);

    // Runs a phase on the calling thread only: for work that takes less time than waking a worker.
    void run_alone(const Phase& phase, int lane = 0);

    // Posts a phase for idle workers that are awake, which replaces the previous one: they call `run` for some of its
    // tasks. Nothing is published, and its end is not signalled: see settle(). One caller at a time.
    void post(const Phase& phase);
    void withdraw();  // no further task of the posted phase is started

    // Active workers do not sleep until let_sleep has been called as many times: for work that a GPU submits, which
    // cannot wake them. Thread-safe.
    void keep_awake();
    void let_sleep() { awake_.fetch_sub(1, std::memory_order_seq_cst); }

    // Lowers the calling thread's priority to that of the workers. Call it once in a thread.
    void lower_priority() const;

    // Waits until no worker is inside a task function. Before that a late worker may still read the inputs of a task
    // that another one has repeated and finished. Callers must call it before they free or reuse inputs.
    void settle();

    // Throws Error (system) if a worker could not be bound to its CPUs.
    void check_bound() const;

    // Throws WorkerDied if a worker has ended. Every phase checks this itself.
    void check_alive() const;

    uint64_t redone() const { return redone_.load(std::memory_order_relaxed); }

    void kill_worker_for_test() {
        kill_.store(true);
        wake();
    }
    void skip_phases_for_test(uint64_t count);  // as if every lane had run so many

  private:
    static constexpr uint64_t kEpochMask = (uint64_t(1) << 24) - 1;
    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};  // epoch << 40 | tasks << 20 | next
    };
    // Late workers read it while it is replaced: every field is atomic, and look_up() checks `epoch` before and after.
    struct Posted {
        std::atomic<uint64_t> epoch{0};
        std::atomic<decltype(Phase::run)> run{nullptr};
        std::atomic<decltype(Phase::run_before)> run_before{nullptr};
        std::atomic<decltype(Phase::publish)> publish{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<int> tasks{0};
        std::atomic<bool> at_home{false};
        std::atomic<const Handing*> handing{nullptr};
        std::atomic<decltype(Phase::fetch)> fetch{nullptr};
        std::atomic<int> begin[kMaxNodes + 1];
    };
    struct Lane {
        Counter next[2][kMaxNodes];  // for even and odd epochs
        Posted posted[2];
        alignas(64) std::atomic<int> done{0};  // in a cache line of its own: it changes with every task
        alignas(64) std::atomic<int> tasks{0};
        std::atomic<uint64_t> epoch{0};  // of the open phase: no task of a later one is started
        std::unique_ptr<std::atomic<uint32_t>[]> claims;
        uint32_t rounds = 0;  // used by the caller: how often epochs have begun anew
        std::atomic<bool> busy{false};
        bool announced = false;  // used by the caller: the phase after the open one is posted

        std::atomic<uint32_t>& claimed(int task) const;  // epoch in which it was last published
    };
    struct Task {
        decltype(Phase::run) run;
        decltype(Phase::run_before) run_before;
        decltype(Phase::publish) publish;
        decltype(Phase::fetch) fetch;
        const void* context;
        uint32_t epoch;
        int id = 0, next = -1, tasks = 0;  // tasks: number in the phase
        int fetched = 0;                   // parts prefetched before it was started
        bool at_home;
        const Handing* handing;
    };
    struct alignas(64) OnLane {  // what a worker keeps for each lane
        uint64_t looked = 0;     // the last epoch in which it searched for owned tasks,
        size_t looked_at = 0;    // and how far
        Task queued;             // a task taken in advance, if its `tasks` is not 0
    };
    struct alignas(64) Worker {
        std::thread thread;
        std::byte* scratch = nullptr;
        std::atomic<bool> inside{false};
        std::atomic<bool> alive{false};
        int node = 0, cpu = -1, rank = 0;  // rank: in its team
        int64_t longest_ns = 0;            // of its tasks, decaying
        std::unique_ptr<OnLane[]> on;      // by lane

        Worker() = default;
        ~Worker();
    };

    static uint64_t after(uint64_t epoch) { return (epoch + 1) & kEpochMask; }

    std::span<Lane> all_lanes() const { return {lanes_.get(), size_t(lanes())}; }
    std::span<Worker> callers() const { return {callers_.get(), size_t(lanes())}; }
    void prepare(Worker& worker) const;
    void start(Worker& worker);
    void end();
    void serve(Worker& worker);
    bool serve_once(Worker& worker, int64_t idle_since_ns);
    void take_lane(Lane& lane);
    void check(const Phase& phase) const;
    static void post(Lane& lane, const Phase& phase, uint64_t epoch);
    void open(Lane& lane, const Phase& phase);
    static void forget_claims(Lane& lane);
    static void close(Lane& lane);
    bool next_task(int lane, Worker& worker, Task& task);
    bool first_task(int lane, Worker& worker, Task& task);
    bool take_owned(int lane, Worker& worker, Task& task);
    bool has_many(const Lane& lane, int node) const;
    bool take(Lane& lane, int node, Task& task, bool early = false);
    bool take_of(Lane& lane, uint64_t wanted, int node, Task& task);
    bool fetch_early(int lane, Worker& worker);
    bool hold(int lane, Worker& worker);
    bool any_work(const Lane& lane, int node) const;  // in the open phase or the announced one
    bool any_open(const Lane& lane, int node) const;
    static bool has_left(const Counter& counter);
    bool take_again(Lane& lane, int node, Task& task);
    bool look_up(Lane& lane, uint64_t epoch, Task& task);
    static bool is_over(const Lane& lane, const Task& task);
    void execute(Lane& lane, const Task& task, Worker& self);
    bool redo(Lane& lane, Worker& self, int64_t waiting_since_ns);
    void abandon(Lane& lane);
    static void empty(Lane& lane);
    void finish(int lane, Worker& self);
    bool any_work(int node) const;
    void idle(Worker& worker, int64_t since_ns);
    void rest(const Worker& worker);
    bool wanted(const Worker& worker) const;
    void wake();

    PoolOptions options_;
    std::vector<int> orphans_;  // nodes without workers, served by all teams
    const std::unique_ptr<Lane[]> lanes_;
    const std::unique_ptr<Worker[]> callers_;  // the thread that calls run() on each lane
    Lane idle_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<bool> stop_{false}, kill_{false};
    alignas(64) std::atomic<uint32_t> bell_{0};  // sleeping workers wait on it; incremented to wake them
    std::atomic<int> asleep_{0};
    std::atomic<int> awake_{0};                // keep_awake calls minus let_sleep calls
    std::atomic<int> wanted_[kMaxNodes] = {};  // active workers of each team
    std::atomic<int> threads_{1};
    alignas(64) std::atomic<uint32_t> gate_{0};  // notified when wanted_ changes
    std::atomic<uint64_t> redone_{0};
    std::string unbound_;  // why a worker could not be bound to its CPU
};

}  // namespace proa
