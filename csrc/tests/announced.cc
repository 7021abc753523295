// Announced phases: no task starts too early, every task is done once, and waiting workers prefetch.
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

#include "check.h"
#include "pool.h"

using namespace proa;

namespace {

constexpr int kParts = 3;

// A phase of a chain.
struct Link {
    const Link* before = nullptr;
    std::vector<std::atomic<int>> published, fetched;  // per task: times published, parts prefetched
    std::atomic<int> begun{0}, all_fetched{0};
    explicit Link(int tasks) : published(size_t(tasks)), fetched(size_t(tasks)) {}
    bool each_once() const {
        for (const auto& n : published)
            if (n.load() != 1) return false;
        return true;
    }
};

Link& of(const void* context) { return *const_cast<Link*>(static_cast<const Link*>(context)); }

bool fetch(const void* context, int task, int part) {
    Link& link = of(context);
    CHECK(part == link.fetched[size_t(task)].fetch_add(1));  // in order, by one worker
    link.all_fetched.fetch_add(part == kParts);
    return part < kParts;
}

Phase phase_of(Link& link, int nodes) {
    Phase phase = spread(int(link.published.size()), nodes);
    phase.context = &link;
    phase.run_before = [](const void* context, int task, int, std::byte* scratch) {
        CHECK(!of(context).before || of(context).before->each_once());
        of(context).begun.fetch_add(1);
        scratch[0] = std::byte(task & 127);
    };
    phase.publish = [](const void* context, int task, const std::byte* scratch) {
        CHECK(scratch[0] == std::byte(task & 127));
        of(context).published[size_t(task)].fetch_add(1);
    };
    phase.fetch = fetch;
    return phase;
}

// Chains of phases: the first may be announced too, some have nothing to prefetch, some have no tasks, and workers are
// late.
void chains_are_done_in_order() {
    const auto late = [] {
        static thread_local unsigned tasks = 0;
        if (++tasks % 127 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    };
    for (const auto& teams :
         std::vector<std::vector<std::vector<int>>>{{{}}, {{0}}, {{0, 0, 0}}, {{0}, {0, 0}}, {{}, {}, {0}}}) {
        Pool pool({.teams = teams, .pin = false, .spin_us = 50, .redo = true, .taken_for_test = late});
        pool.skip_phases_for_test((1 << 24) - 100);  // epochs begin anew on the way
        std::deque<Link> links;
        for (int i = 0; i < 200; ++i) {
            std::vector<Phase> chain;
            const Link* before = nullptr;
            for (int n = 0; n <= i % 4; ++n) {
                Link& link = links.emplace_back((i + 5 * n) % 23);
                link.before = before, before = &link;
                chain.push_back(phase_of(link, pool.nodes()));
                if ((i + n) % 7 == 0) chain.back().fetch = nullptr;
            }
            if (i % 3 == 0) pool.announce(chain[0]);
            for (size_t n = 0; n < chain.size(); ++n)
                pool.run(chain[n], 0, n + 1 < chain.size() ? &chain[n + 1] : nullptr);
        }
        pool.settle();
        for (const Link& link : links) CHECK(link.each_once());
    }
}

// The caller's only task ends when the workers have prefetched for their next tasks.
void waiting_workers_prefetch() {
    Pool pool({.teams = {{0, 0}}, .pin = false, .spin_us = 50, .redo = false});
    for (int i = 0; i < 50; ++i) {
        Link link(8);
        const Phase then = phase_of(link, 1);
        Phase phase = spread(1, 1);
        phase.context = &link;
        phase.publish = [](const void* context, int, const std::byte*) {
            while (of(context).all_fetched.load() < 2) std::this_thread::yield();
            CHECK(of(context).begun.load() == 0);
        };
        pool.run(phase, 0, &then);
        pool.run(then);
        pool.settle();
        CHECK(link.each_once());
        int taken = 0;
        for (const auto& parts : link.fetched) taken += parts.load() > 0;
        CHECK(taken >= 2 && taken <= 3);
    }
}

// A worker that waits on the second lane switches to the first as soon as that has a task.
void the_first_lane_has_priority_over_waiting() {
    Pool pool({.teams = {{0}}, .pin = false, .spin_us = 50, .redo = false, .lanes = 2});
    struct Both {
        Link link{4};
        std::atomic<int> here{0};
        std::atomic<bool> over{false};
    } both;
    std::thread second([&] {
        const Phase then = phase_of(both.link, 1);
        pool.announce(then, 1);
        while (!both.over.load()) std::this_thread::yield();
        pool.run(then, 1);
    });
    while (both.link.all_fetched.load() < 1) std::this_thread::yield();
    Phase phase = spread(2, 1);
    phase.context = &both;
    phase.publish = [](const void* context, int, const std::byte*) {
        auto& all = *const_cast<Both*>(static_cast<const Both*>(context));
        all.here.fetch_add(1);
        while (all.here.load() < 2) std::this_thread::yield();  // until the worker comes
    };
    pool.run(phase);
    both.over.store(true);
    second.join();
    pool.settle();
    CHECK(both.link.each_once());
}

// The first thread to run the only task blocks until another thread has done it, while the others hold tasks of the
// next phase.
void waiting_workers_repeat_late_tasks() {
    Pool pool({.teams = {{0, 0}}, .pin = false, .spin_us = 100000, .redo = true});
    for (int i = 0; i < 20; ++i) {
        struct Stuck {
            std::atomic<int> runs{0}, published{0};
        } stuck;
        Phase phase = spread(1, 1);
        phase.context = &stuck;
        phase.run = [](const void* context, int, std::byte*) {
            Stuck& s = *const_cast<Stuck*>(static_cast<const Stuck*>(context));
            if (s.runs.fetch_add(1) > 0) return;
            while (s.published.load() == 0) std::this_thread::yield();
        };
        phase.publish = [](const void* context, int, const std::byte*) {
            const_cast<Stuck*>(static_cast<const Stuck*>(context))->published.fetch_add(1);
        };
        Link link(6);
        const Phase then = phase_of(link, 1);
        pool.run(phase, 0, &then);
        pool.run(then);
        pool.settle();
        CHECK(stuck.published.load() == 1 && link.each_once());
    }
}

// A worker dies during a phase, while it holds a task of the next one: no task of the next phase starts.
void no_task_starts_after_an_error() {
    Pool pool({.teams = {{0, 0}}, .pin = false, .spin_us = 100000, .redo = false});
    struct Dying {
        Pool* pool;
        std::thread::id caller = std::this_thread::get_id();
        Link then{6};
        std::atomic<int> workers{0};
    } dying{.pool = &pool};
    Phase phase = spread(2, 1);
    phase.context = &dying;
    phase.run = [](const void* context, int, std::byte*) {
        auto& all = *const_cast<Dying*>(static_cast<const Dying*>(context));
        if (std::this_thread::get_id() == all.caller) {  // the other task is a worker's
            while (all.workers.load() == 0) std::this_thread::yield();
        } else if (all.workers.fetch_add(1) == 0) {
            while (all.then.all_fetched.load() == 0) std::this_thread::yield();
            all.pool->kill_worker_for_test();
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    };
    const Phase then = phase_of(dying.then, 1);
    for (int i = 0; i < 2; ++i) {  // the lane is free again, and no worker runs its tasks
        bool failed = false;
        try {
            pool.run(phase, 0, &then);
            pool.run(then);
        } catch (const WorkerDied&) {
            failed = true;
        }
        CHECK(failed);
        pool.settle();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(dying.then.begun.load() == 0);
    }
}

void a_lane_has_one_caller() {
    Pool pool({.teams = {{}}, .pin = false});
    Link link(3);
    const Phase phase = phase_of(link, 1);
    pool.announce(phase);
    std::thread([&] {
        try {
            pool.announce(phase);
            CHECK(false);
        } catch (const Error& error) {
            CHECK(error.code() == PROA_ERROR_ARGUMENT);
        }
    }).join();
    pool.run(phase);
    CHECK(link.each_once());
}

}  // namespace

int main() {
    chains_are_done_in_order();
    waiting_workers_prefetch();
    the_first_lane_has_priority_over_waiting();
    waiting_workers_repeat_late_tasks();
    no_task_starts_after_an_error();
    a_lane_has_one_caller();
    return 0;
}
