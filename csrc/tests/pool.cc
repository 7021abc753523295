// The pool: every task is published exactly once, whichever worker runs it and however late it is.
#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

using namespace proa;

namespace {

struct Count {
    std::vector<std::atomic<int>> published;
    explicit Count(int tasks) : published(size_t(tasks)) {}
    bool each_once() const {
        for (const auto& n : published)
            if (n.load() != 1) return false;
        return true;
    }
};

Phase counting(Count& count, int nodes) {
    Phase phase = spread(int(count.published.size()), nodes);
    phase.run = [](const void*, int task, std::byte* scratch) { scratch[0] = std::byte(task & 127); };
    phase.publish = [](const void* context, int task, const std::byte* scratch) {
        CHECK(scratch[0] == std::byte(task & 127));
        const_cast<Count*>(static_cast<const Count*>(context))->published[size_t(task)].fetch_add(1);
    };
    phase.context = &count;
    return phase;
}

// A counting phase whose tasks get the probable next task.
Phase counting_before(Count& count, int nodes) {
    Phase phase = counting(count, nodes);
    phase.run = nullptr;
    phase.run_before = [](const void* context, int task, int next, std::byte* scratch) {
        const auto& all = *static_cast<const Count*>(context);
        CHECK(next >= -1 && next < int(all.published.size()));
        scratch[0] = std::byte(task & 127);
    };
    return phase;
}

void every_task_is_published_once() {
    for (const auto& teams :
         std::vector<std::vector<std::vector<int>>>{{{}}, {{0}}, {{0, 0, 0}}, {{0}, {0}}, {{}, {}, {0}}, {{}, {}}}) {
        Pool pool({.teams = teams, .pin = false, .spin_us = 50, .redo = true});
        for (int tasks : {0, 1, 2, 7, 1000}) {
            for (int i = 0; i < 20; ++i) {
                Count count(tasks);
                pool.run(i % 2 ? counting(count, pool.nodes()) : counting_before(count, pool.nodes()));
                pool.settle();
                CHECK(count.each_once());
            }
        }
    }
}

void a_refused_thread_is_an_error() {
    static int left;  // threads that the system starts before it refuses
    const auto start = [] {
        if (left-- == 0) throw std::system_error(EAGAIN, std::generic_category());
    };
    for (int started : {0, 1, 4}) {
        left = started;
        std::string what;
        try {
            const Pool pool({.teams = {{0, 0, 0}, {0, 0}}, .pin = false, .starting_for_test = start});
        } catch (const Error& error) {
            CHECK(error.code() == PROA_ERROR_SYSTEM);
            what = error.what();
        }
        CHECK(what.find("refused to start one of 5 worker threads: ") != std::string::npos);
    }
}

// Task numbers that only some phases have may be used again after exactly as many phases as there are epochs.
void epochs_begin_anew() {
    constexpr uint64_t kEpochs = 1 << 24;
    for (int workers : {0, 2}) {
        Pool pool({.teams = {std::vector<int>(size_t(workers), 0)}, .pin = false, .spin_us = 50});
        const auto run = [&](int tasks) {
            Count count(tasks);
            pool.run(counting(count, 1));
            pool.settle();
            CHECK(count.each_once());
        };
        alarm(20);  // an error is a phase that does not end
        run(2000);
        pool.skip_phases_for_test(kEpochs - 3);
        for (int tasks : {1, 1, 2000}) run(tasks);
        alarm(0);
    }
}

void sleeping_workers_wake() {
    Pool pool({.teams = {{0, 0}}, .pin = false, .spin_us = 0, .redo = false});
    for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        Count count(50);
        pool.run(counting(count, 1));
        CHECK(count.each_once());
    }
}

// Records which threads publish; a phase ends only when every active thread takes part.
struct Attendance {
    int all;
    std::atomic<int> here{0};
};

int code_of(auto&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.code();
    }
    return PROA_OK;
}

void only_those_in_use_work() {
    Pool pool({.teams = {{0, 0, 0}, {0, 0}, {}}, .pin = false, .spin_us = 50, .redo = false});
    CHECK(pool.threads() == 6);
    for (int round = 0; round < 20; ++round) {
        for (const auto& [workers, threads] : std::vector<std::pair<std::vector<int>, int>>{
                 {{3, 2, 0}, 6}, {{0, 1, 0}, 2}, {{1, 2, 0}, 4}, {{2, 1, 0}, 4}}) {
            pool.use(workers);
            CHECK(pool.threads() == threads);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // inactive workers go to sleep
            Attendance attendance{threads};
            Phase phase = spread(1, pool.nodes());
            for (int n = 0; n < pool.nodes(); ++n)
                phase.begin[n + 1] = phase.begin[n] + workers[size_t(n)] + (n == 0 ? 1 : 0);
            phase.context = &attendance;
            phase.publish = [](const void* context, int, const std::byte*) {
                auto& a = *const_cast<Attendance*>(static_cast<const Attendance*>(context));
                a.here.fetch_add(1);
                while (a.here.load() < a.all) std::this_thread::yield();  // waits for all active threads
            };
            pool.run(phase);
            pool.settle();
            Count count(500);
            pool.run(counting(count, pool.nodes()));
            pool.settle();
            CHECK(count.each_once());
        }
    }
    for (const std::vector<int>& wrong : {std::vector<int>{3, 2}, {4, 2, 0}, {3, 0, 0}, {3, 2, 1}, {-1, 2, 0}})
        CHECK(code_of([&] { pool.use(wrong); }) == PROA_ERROR_ARGUMENT);
    CHECK(pool.threads() == 4);
}

// An inactive worker takes no tasks: while the caller sleeps in its only task, the other tasks wait.
void inactive_workers_do_not_work() {
    Pool pool({.teams = {{0, 0, 0}}, .pin = false, .spin_us = 0, .redo = true});
    pool.use({0});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::thread::id caller = std::this_thread::get_id();
    for (int i = 0; i < 50; ++i) {
        Phase phase = spread(20, 1);
        phase.context = &caller;
        phase.run = nullptr;
        phase.publish = [](const void* context, int, const std::byte*) {
            CHECK(std::this_thread::get_id() == *static_cast<const std::thread::id*>(context));
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        };
        pool.run(phase);
    }
}

void workers_stay_at_home() {
    cpu_set_t mine;
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    std::vector<int> home;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &mine)) home.push_back(cpu);
    for (const bool own : {true, false}) {
        PoolOptions options{.teams = {{home[0]}}, .pin = true, .homes = {}};
        if (!own) options.homes = {home};
        Pool pool(options);
        pool.check_bound();
        struct Seen {
            std::thread::id caller = std::this_thread::get_id();
            std::atomic<int> cpus{0}, here{0};
        } seen;
        Phase phase = spread(2, 1);
        phase.context = &seen;
        phase.publish = [](const void* context, int, const std::byte*) {
            auto& s = *const_cast<Seen*>(static_cast<const Seen*>(context));
            s.here.fetch_add(1);
            while (s.here.load() < 2) std::this_thread::yield();
            if (std::this_thread::get_id() == s.caller) return;
            cpu_set_t cpus;
            CHECK(sched_getaffinity(0, sizeof cpus, &cpus) == 0);
            s.cpus.store(CPU_COUNT(&cpus));
        };
        pool.run(phase);
        CHECK(seen.cpus.load() == (own ? 1 : int(home.size())));
    }
    Pool nowhere({.teams = {{home[0]}}, .pin = true, .homes = {{CPU_SETSIZE - 1}}});
    CHECK(code_of([&] { nowhere.check_bound(); }) == PROA_ERROR_SYSTEM);
}

// A caller on each lane, with announced phases on some: every task runs once, on every number of lanes.
void lanes_work_at_once(int lanes) {
    Pool pool({.teams = {{0, 0}, {0}}, .pin = false, .spin_us = 50, .redo = false, .lanes = lanes});
    CHECK(pool.lanes() == lanes);
    std::vector<std::thread> callers;
    for (int lane = 0; lane < lanes; ++lane)
        callers.emplace_back([&pool, lane] {
            for (int i = 0; i < 200; ++i) {
                Count count(30 + lane), after(7);
                Phase then = counting(after, 2);
                if (lane % 2) then.fetch = [](const void*, int, int part) { return part < 2; };
                pool.run(counting(count, 2), lane, &then);
                pool.run(then, lane);
                CHECK(count.each_once() && after.each_once());
                pool.settle();
            }
        });
    for (std::thread& caller : callers) caller.join();
}

void two_pools_work_at_once() {
    Pool one({.teams = {{0}}, .pin = false}), two({.teams = {{0}}, .pin = false});
    Count first(500), second(500);
    std::thread other([&] { two.run(counting(second, 1)); });
    one.run(counting(first, 1));
    other.join();
    CHECK(first.each_once() && second.each_once());
}

// The first thread to run task 0 blocks, as if preempted by the operating system.
struct Stuck {
    std::atomic<int> runs{0}, published{0};
    std::atomic<bool> released{false};
};

void a_late_workers_task_is_done_again() {
    Pool pool({.teams = {{0, 0}}, .pin = false, .spin_us = 100000, .redo = true});
    Stuck stuck;
    Phase phase = spread(8, 1);
    phase.run = [](const void* context, int task, std::byte*) {
        Stuck& s = *const_cast<Stuck*>(static_cast<const Stuck*>(context));
        if (task == 0 && s.runs.fetch_add(1) == 0)
            while (!s.released.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    phase.publish = [](const void* context, int task, const std::byte*) {
        if (task == 0) const_cast<Stuck*>(static_cast<const Stuck*>(context))->published.fetch_add(1);
    };
    phase.context = &stuck;
    // The blocked thread may be the caller: then a worker does the task, and the caller is released.
    std::thread release([&] {
        while (stuck.published.load() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        Count count(100);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        stuck.released.store(true);
    });
    pool.run(phase);
    CHECK(stuck.published.load() == 1);
    Count count(100);
    pool.run(counting(count, 1));  // while the late worker may still be in its old task
    release.join();
    pool.settle();
    CHECK(count.each_once());
    CHECK(stuck.published.load() == 1 && stuck.runs.load() >= 2);
    CHECK(pool.redone() >= 1);
}

// Short consecutive phases, as in a program. Some workers are preempted between taking a task and starting it; when
// they resume, another phase has a task of that number, which they must not touch.
void a_worker_late_for_a_task_leaves_later_phases_alone() {
    const auto late = [] {
        static thread_local unsigned tasks = 0;
        if (++tasks % 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    };
    Pool pool({.teams = {{0, 0, 0}}, .pin = false, .spin_us = 100000, .redo = true, .taken_for_test = late});
    std::deque<Count> counts;
    for (int i = 0; i < 2000; ++i) {
        Count& count = counts.emplace_back(1 + i % 8);
        pool.run(counting(count, 1));
        CHECK(count.each_once());
    }
    pool.settle();
    for (const Count& count : counts) CHECK(count.each_once());
    CHECK(pool.redone() > 0);
}

// Records which worker ran which task of a phase for idle workers.
struct Readers {
    std::vector<std::atomic<const std::byte*>> of;
    std::atomic<int> read{0};
    explicit Readers(int tasks) : of(size_t(tasks)) {}
};

Phase reading(Readers& readers, int nodes) {
    Phase phase = spread(int(readers.of.size()), nodes);
    phase.context = &readers;
    phase.run = [](const void* context, int task, std::byte* scratch) {
        auto& all = *const_cast<Readers*>(static_cast<const Readers*>(context));
        all.of[size_t(task)].store(scratch);
        all.read.fetch_add(1);
    };
    return phase;
}

// Workers first take the tasks whose data they have read in advance, and every task is still published once, whatever
// was posted or withdrawn in between and however little of it was done.
void owned_tasks_are_published_once() {
    constexpr int kTasks = 60;
    int by_owners = 0;
    for (const auto& teams : std::vector<std::vector<std::vector<int>>>{{{0}}, {{0, 0}}, {{0}, {0, 0}}, {{}, {0}}}) {
        Pool pool({.teams = teams, .pin = false, .spin_us = 50, .redo = true});
        pool.keep_awake();
        std::deque<Readers> all;
        for (int i = 0; i < 100; ++i) {
            Readers& readers = all.emplace_back(kTasks);
            pool.post(reading(readers, pool.nodes()));
            for (int waits = 0; readers.read.load() < i % 4 * kTasks / 3 && waits < 50; ++waits)
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            pool.withdraw();
            Count count(kTasks);
            Phase phase = i % 2 ? counting(count, pool.nodes()) : counting_before(count, pool.nodes());
            Handing handing;
            handing.order.resize(kTasks);
            for (int node = 0; node < pool.nodes(); ++node) {
                int first = phase.begin[node], last = phase.begin[node + 1];
                for (int task = first, end = last; task < end; ++task) {
                    const std::byte* reader = readers.of[size_t(task)].load();
                    if (reader) handing.owned.push_back({reader, task});
                    handing.order[size_t(reader ? --last : first++)] = task;
                }
            }
            phase.handing = &handing;
            by_owners += int(handing.owned.size());
            pool.run(phase);
            pool.settle();
            CHECK(count.each_once());
        }
        pool.let_sleep();
    }
    CHECK(by_owners > 0);
}

void a_dead_worker_is_an_error() {
    Pool pool({.teams = {{0}}, .pin = false, .spin_us = 50});
    pool.kill_worker_for_test();
    bool failed = false;
    for (int i = 0; i < 1000 && !failed; ++i) {
        Count count(10);
        try {
            pool.run(counting(count, 1));
        } catch (const WorkerDied&) {
            failed = true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(failed);
}

}  // namespace

int main() {
    every_task_is_published_once();
    a_refused_thread_is_an_error();
    epochs_begin_anew();
    sleeping_workers_wake();
    only_those_in_use_work();
    inactive_workers_do_not_work();
    workers_stay_at_home();
    for (int lanes : {1, 2, 3, 5}) lanes_work_at_once(lanes);
    two_pools_work_at_once();
    a_late_workers_task_is_done_again();
    a_worker_late_for_a_task_leaves_later_phases_alone();
    owned_tasks_are_published_once();
    a_dead_worker_is_an_error();
    return 0;
}
