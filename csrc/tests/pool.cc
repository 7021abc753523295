// The pool: every task is published once, whoever runs it, however late a worker is.
#include "pool.h"

#include <chrono>
#include <deque>
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

void every_task_is_published_once() {
    for (const auto& teams :
         std::vector<std::vector<std::vector<int>>>{{{}}, {{0}}, {{0, 0, 0}}, {{0}, {0}}, {{}, {}, {0}}, {{}, {}}}) {
        Pool pool({.teams = teams, .pin = false, .spin_us = 50, .redo = true});
        for (int tasks : {0, 1, 2, 7, 1000}) {
            for (int i = 0; i < 20; ++i) {
                Count count(tasks);
                pool.run(counting(count, pool.nodes()));
                pool.settle();
                CHECK(count.each_once());
            }
        }
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

void two_lanes_work_at_once() {
    Pool pool({.teams = {{0, 0}}, .pin = false});
    std::thread other([&] {
        for (int i = 0; i < 200; ++i) {
            Count count(30);
            pool.run(counting(count, 1), 1);
            CHECK(count.each_once());
        }
    });
    for (int i = 0; i < 200; ++i) {
        Count count(30);
        pool.run(counting(count, 1), 0);
        CHECK(count.each_once());
    }
    other.join();
    pool.settle();
}

void two_pools_work_at_once() {
    Pool one({.teams = {{0}}, .pin = false}), two({.teams = {{0}}, .pin = false});
    Count first(500), second(500);
    std::thread other([&] { two.run(counting(second, 1)); });
    one.run(counting(first, 1));
    other.join();
    CHECK(first.each_once() && second.each_once());
}

// Whoever runs task 0 first is taken off its core for long, as by the operating system.
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
    // The caller may be the one that is stuck: then a worker does the task, and the caller is let go.
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

// As in a program: short phases, each right after the other. Some workers are taken off their core between taking a
// task and beginning it; when they come back another phase has a task of that number, and they must leave it alone.
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
    sleeping_workers_wake();
    two_lanes_work_at_once();
    two_pools_work_at_once();
    a_late_workers_task_is_done_again();
    a_worker_late_for_a_task_leaves_later_phases_alone();
    a_dead_worker_is_an_error();
    return 0;
}
