// The workers: one team of threads per memory node, and the thread that calls. Belongs here: handing out tasks,
// waiting, parking. Never: what a task computes.
//
// Work comes in phases of independent tasks. Each task belongs to a node and is taken by that node's team. A task
// computes into the private scratch of whoever runs it and is published once: `run` may be repeated by a second worker
// when the first was taken off its core by the operating system, and only one of the two gets to `publish`. So a busy
// core delays a phase by a task, not by a time slice.
//
// The phase behind the one at work may be announced: whoever finds no more tasks takes one of those, and fetches what
// it will read until the phase is opened. So memory is not idle while the last tasks are done (decision 039).
//
// Two lanes carry the phases of two callers (decode and prefill); workers look at the first lane before every task.
// Whoever finds nothing there does what was posted for idle workers, which nobody waits for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "error.h"

namespace proa {

// What a thread does while it spins.
void relax();

constexpr int kMaxNodes = 64;
constexpr int kLanes = 2;
constexpr size_t kScratchBytes = size_t(256) << 20;  // address space of each worker; memory is taken as it is touched
constexpr int kMaxTasks = 1 << 20;                   // of a phase

// Who should take which tasks of a phase: those whose weights it has in its cache already.
struct Handing {
    struct Owned {
        const std::byte* scratch;  // of the worker
        int task;
    };
    std::vector<Owned> owned;
    std::vector<int32_t> order;  // of every place in the phase, its task: of each node the owned ones last
};

struct Phase {
    void (*run)(const void* context, int task, std::byte* scratch);
    void (*publish)(const void* context, int task, const std::byte* scratch);
    const void* context;
    // Instead of `run`, for short tasks that can prepare the one behind them: next is what this worker will probably do
    // after this task, or -1.
    void (*run_before)(const void* context, int task, int next, std::byte* scratch) = nullptr;
    int nodes;
    int begin[kMaxNodes + 1];  // node n owns tasks [begin[n], begin[n + 1])
    bool at_home = false;      // nobody else does them, however long they wait
    const Handing* handing = nullptr;
    // Asks for a part of what a task will read, before what it reads of others exists; false: there is no such part.
    bool (*fetch)(const void* context, int task, int part) = nullptr;
};

// A phase whose tasks have no home: divided evenly over the nodes.
Phase spread(int tasks, int nodes);

// One whose work is its publishing: short tasks that write where all can see, so that nobody may do them twice.
Phase published(int tasks, int nodes, const void* context, decltype(Phase::publish) publish);

struct WorkerDied : Error {
    explicit WorkerDied(const std::string& what) : Error(PROA_ERROR_WORKER, what) {}
};

struct PoolOptions {
    std::vector<std::vector<int>> teams;       // logical CPUs of each node's workers, the calling thread not among them
    bool pin = true;                           // bind each worker to its CPU,
    std::vector<std::vector<int>> homes = {};  // or, where these are given, to all CPUs of its team's home
    int spin_us = 1000;                        // how long an idle worker spins before it sleeps
    bool redo = true;
    void (*taken_for_test)() = nullptr;  // called between taking a task and beginning it
};

class Pool {
  public:
    explicit Pool(PoolOptions options);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int nodes() const { return int(options_.teams.size()); }
    int threads() const { return threads_.load(std::memory_order_relaxed); }  // that work, the calling one included

    // From now on only the first `workers[node]` of each team work; the others sleep and cost nothing. A team that has
    // workers keeps one, but for the caller's.
    void use(const std::vector<int>& workers);

    // Runs a phase on a lane; the calling thread works along as a member of node 0. One caller a lane at a time. Throws
    // WorkerDied. Task functions must not throw.
    // then: announced meanwhile; the lane's next phase.
    void run(const Phase& phase, int lane = 0, const Phase* then = nullptr);

    // The lane's next phase, before what its tasks read is there. Nothing happens where it has no `fetch`.
    void announce(const Phase& phase, int lane = 0);

    // The same on the calling thread alone: for work that is done before anybody else has noticed it.
    void run_alone(const Phase& phase, int lane = 0);

    // For workers that have nothing else to do and are awake: `run` of the phase's tasks, some of them, instead of
    // those of the last such phase. Nothing is published, and nothing says when it is over: see settle(). One caller at
    // a time.
    void post(const Phase& phase);
    void withdraw();  // no further task of it is begun

    // Until as many calls of let_sleep, no worker that takes part sleeps, however long it idles: for callers who cannot
    // wake one. From any thread.
    void keep_awake();
    void let_sleep() { awake_.fetch_sub(1, std::memory_order_seq_cst); }

    // Returns when no worker is inside a task function any more. Until then a slow worker may still read the inputs of
    // a task that another one has finished in its place. Callers whose buffers end with the call wait for it.
    void settle();

    // Throws Error (system) if a worker is not where it should be.
    void check_bound() const;

    // Throws WorkerDied if one has ended. Every phase looks by itself.
    void check_alive() const;

    uint64_t redone() const { return redone_.load(std::memory_order_relaxed); }

    void kill_worker_for_test() {
        kill_.store(true);
        wake();
    }

  private:
    static constexpr uint64_t kEpochMask = (uint64_t(1) << 24) - 1;
    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};  // epoch << 40 | tasks << 20 | next
    };
    struct Posted {  // read by workers that may be late: every field is atomic, `epoch` is checked before and after
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
        Counter next[2][kMaxNodes];  // of even and odd epochs
        Posted posted[2];
        alignas(64) std::atomic<int> done{0};  // alone in its line: it changes with every task
        alignas(64) std::atomic<int> tasks{0};
        std::atomic<uint64_t> epoch{0};  // of the phase that is open: no task of a later one is begun
        std::unique_ptr<std::atomic<uint32_t>[]> claims;
        std::atomic<bool> busy{false};
        bool announced = false;  // the caller's: the phase behind the open one is posted

        std::atomic<uint32_t>& claimed(int task) const;  // epoch in which it was last published
    };
    struct Task {
        decltype(Phase::run) run;
        decltype(Phase::run_before) run_before;
        decltype(Phase::publish) publish;
        decltype(Phase::fetch) fetch;
        const void* context;
        uint32_t epoch;
        int id = 0, next = -1, tasks = 0;  // tasks: of the phase
        int fetched = 0;                   // parts, before it was begun
        bool at_home;
        const Handing* handing;
    };
    struct alignas(64) Worker {
        std::thread thread;
        std::byte* scratch = nullptr;
        std::atomic<bool> inside{false};
        std::atomic<bool> alive{false};
        int node = 0, cpu = -1, rank = 0;  // in its team
        int64_t longest_ns = 0;            // of its tasks, fading
        uint64_t looked[kLanes] = {};      // the last epoch in which it looked for tasks of its own,
        size_t looked_at[kLanes] = {};     // and how far
        Task queued[kLanes];               // what it has taken besides the task that it is at, if its `tasks` is not 0
    };

    static uint64_t after(uint64_t epoch) { return (epoch + 1) & kEpochMask; }

    void start(Worker& worker);
    void serve(Worker& worker);
    bool serve_once(Worker& worker, int64_t idle_since_ns);
    void take_lane(Lane& lane);
    void check(const Phase& phase) const;
    static void post(Lane& lane, const Phase& phase, uint64_t epoch);
    void open(Lane& lane, const Phase& phase);
    static void close(Lane& lane);
    bool next_task(int lane, Worker& worker, Task& task);
    bool first_task(int lane, Worker& worker, Task& task);
    bool take_owned(int lane, Worker& worker, Task& task);
    bool has_many(const Lane& lane, int node) const;
    bool take(Lane& lane, int node, Task& task, bool early = false);
    bool take_of(Lane& lane, uint64_t wanted, int node, Task& task);
    bool fetch_early(int lane, Worker& worker);
    bool hold(int lane, Worker& worker);
    bool any_work(const Lane& lane, int node) const;
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
    std::vector<int> orphans_;  // nodes without a worker: everybody serves them
    Lane lanes_[kLanes], idle_;
    Worker callers_[kLanes];
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<bool> stop_{false}, kill_{false};
    alignas(64) std::atomic<uint32_t> bell_{0};
    std::atomic<int> asleep_{0};
    std::atomic<int> awake_{0};                // calls of keep_awake that hold
    std::atomic<int> wanted_[kMaxNodes] = {};  // workers of each team that take part
    std::atomic<int> threads_{1};
    alignas(64) std::atomic<uint32_t> gate_{0};  // rung when that changes
    std::atomic<uint64_t> redone_{0};
    std::string unbound_;  // why a worker could not be bound to its CPU
};

}  // namespace proa
