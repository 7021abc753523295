// The lanes' open tasks, and how workers take them. Never: running tasks, waiting.
#include <algorithm>

#include "pool.h"

namespace proa {
namespace {

constexpr int kIndexBits = 20;  // of Counter
constexpr uint64_t kIndexMask = (uint64_t(1) << kIndexBits) - 1;
constexpr int kManyLeft = 2;  // tasks per worker of the node: see has_many
constexpr size_t kAllSeen = ~size_t(0);

}  // namespace

// Opens a phase, which it posts unless it was announced: workers start its tasks.
void Pool::open(Lane& lane, const Phase& phase) {
    const uint64_t epoch = after(lane.epoch.load(std::memory_order_relaxed));
    if (epoch == 0 && lane.claims) forget_claims(lane);
    lane.done.store(0, std::memory_order_relaxed);
    lane.tasks.store(phase.begin[phase.nodes], std::memory_order_relaxed);
    if (!lane.announced) post(lane, phase, epoch);
    lane.epoch.store(epoch, std::memory_order_seq_cst);
}

// Epochs begin anew: tasks that were last published 2^24 phases ago must not count as published in this one. Meanwhile
// no phase is open, and the mark is new, so that no late worker publishes again: see execute().
void Pool::forget_claims(Lane& lane) {
    lane.epoch.store(~uint64_t(0), std::memory_order_seq_cst);  // the one before 0, too
    const uint32_t mark = uint32_t(kEpochMask) + 2 + lane.rounds++;
    for (int task = 0; task < kMaxTasks; ++task) lane.claims[size_t(task)].store(mark, std::memory_order_release);
}

void Pool::skip_phases_for_test(uint64_t count) {
    for (Lane& lane : all_lanes()) lane.epoch.store((lane.epoch.load() + count) & kEpochMask);
}

// Posts a phase: workers can take its tasks, but not start them.
void Pool::post(Lane& lane, const Phase& phase, uint64_t epoch) {
    Posted& posted = lane.posted[epoch & 1];
    posted.epoch.store(~uint64_t(0), std::memory_order_seq_cst);
    posted.run.store(phase.run, std::memory_order_release);  // not before the old epoch is invalidated
    posted.run_before.store(phase.run_before, std::memory_order_release);
    posted.publish.store(phase.publish, std::memory_order_release);
    posted.context.store(phase.context, std::memory_order_release);
    posted.tasks.store(phase.begin[phase.nodes], std::memory_order_release);
    posted.at_home.store(phase.at_home, std::memory_order_release);
    posted.handing.store(phase.handing, std::memory_order_release);
    posted.fetch.store(phase.fetch, std::memory_order_release);
    for (int n = 0; n <= phase.nodes; ++n) posted.begin[n].store(phase.begin[n], std::memory_order_release);
    posted.epoch.store(epoch, std::memory_order_release);
    for (int n = 0; n < phase.nodes; ++n) {
        const uint64_t count = uint64_t(phase.begin[n + 1] - phase.begin[n]);
        lane.next[epoch & 1][n].value.store(epoch << 40 | count << kIndexBits, std::memory_order_seq_cst);
    }
}

// Removes the pointer to the phase's Handing, which its caller may free: a worker that has read the pointer before
// counts as inside, so settle() waits for it.
void Pool::close(Lane& lane) {
    lane.posted[lane.epoch.load(std::memory_order_relaxed) & 1].handing.store(nullptr, std::memory_order_seq_cst);
}

void Pool::empty(Lane& lane) {
    for (auto& counters : lane.next)
        for (Counter& counter : counters) counter.value.store(0, std::memory_order_seq_cst);
}

// Permutes the tasks' claims so that those of tasks that finish at about the same time lie in different cache lines.
std::atomic<uint32_t>& Pool::Lane::claimed(int task) const {
    return claims[size_t((task & ~1023) | (task & 63) << 4 | (task >> 6 & 15))];
}

bool Pool::look_up(Lane& lane, uint64_t epoch, Task& task) {
    Posted& posted = lane.posted[epoch & 1];
    if (posted.epoch.load(std::memory_order_acquire) != epoch) return false;
    task.run = posted.run.load(std::memory_order_acquire);  // before the epoch is read again
    task.run_before = posted.run_before.load(std::memory_order_acquire);
    task.publish = posted.publish.load(std::memory_order_acquire);
    task.context = posted.context.load(std::memory_order_acquire);
    task.tasks = posted.tasks.load(std::memory_order_acquire);
    task.at_home = posted.at_home.load(std::memory_order_acquire);
    task.handing = posted.handing.load(std::memory_order_seq_cst);
    task.fetch = posted.fetch.load(std::memory_order_acquire);
    task.epoch = uint32_t(epoch);
    return posted.epoch.load(std::memory_order_relaxed) == epoch;
}

// Takes a task to run now; if tasks prefetch for the following one, takes that one too, while many are left.
bool Pool::next_task(int lane, Worker& worker, Task& task) {
    Task& queued = worker.on[size_t(lane)].queued;
    const auto is_early = [&](const Task& it) {
        return it.epoch == after(lanes_[size_t(lane)].epoch.load(std::memory_order_acquire));
    };
    if (queued.tasks && !is_early(queued)) {
        task = queued;
        queued.tasks = 0;
        if (is_over(lanes_[size_t(lane)], task)) return next_task(lane, worker, task);
    } else if (!first_task(lane, worker, task)) {
        return false;
    } else if (is_early(task)) {
        // The open phase ended during the search, so this task belongs to the announced one, and the queued one to the
        // phase that is open now.
        std::swap(task, queued);
        if (!task.tasks) return false;
        if (is_over(lanes_[size_t(lane)], task)) return next_task(lane, worker, task);
    }
    if (task.run_before && !queued.tasks && has_many(lanes_[size_t(lane)], worker.node) &&
        first_task(lane, worker, queued) && queued.epoch == task.epoch)
        task.next = queued.id;
    return true;
}

bool Pool::first_task(int lane, Worker& worker, Task& task) {
    task = Task();
    if (take_owned(lane, worker, task) || take(lanes_[size_t(lane)], worker.node, task)) return true;
    task.tasks = 0;
    return false;
}

// True if so many tasks are left that one taken in advance will not be the last to finish.
bool Pool::has_many(const Lane& lane, int node) const {
    const uint64_t seen =
        lane.next[lane.epoch.load(std::memory_order_relaxed) & 1][node].value.load(std::memory_order_relaxed);
    const int left = int(seen >> kIndexBits & kIndexMask) - int(seen & kIndexMask);
    return left > kManyLeft * (wanted_[node].load(std::memory_order_relaxed) + 1);
}

bool Pool::take(Lane& lane, int node, Task& task, bool early) {
    uint64_t epoch = lane.epoch.load(std::memory_order_seq_cst);
    if (early) epoch = after(epoch);
    if (take_of(lane, epoch, node, task)) return true;
    for (int orphan : orphans_)
        if (take_of(lane, epoch, orphan, task)) return true;
    return false;
}

// Takes the node's next task. False if the phase ended meanwhile, which its epoch shows.
bool Pool::take_of(Lane& lane, uint64_t wanted, int node, Task& task) {
    std::atomic<uint64_t>& next = lane.next[wanted & 1][node].value;
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

// Takes a task of the phase after the open one, or prefetches a part of the inputs of the one that it took. False if
// there is nothing left to do.
bool Pool::fetch_early(int lane, Worker& worker) {
    Task& queued = worker.on[size_t(lane)].queued;
    if (!queued.tasks) {
        queued = Task();
        if (take(lanes_[size_t(lane)], worker.node, queued, true)) return true;
        queued.tasks = 0;
        return false;
    }
    if (!queued.fetch || queued.fetched < 0) return false;
    if (!queued.fetch(queued.context, queued.id, queued.fetched++)) queued.fetched = -1;
    return true;
}

// Takes the next task that is assigned to this worker.
bool Pool::take_owned(int lane, Worker& worker, Task& task) {
    const uint64_t epoch = lanes_[size_t(lane)].epoch.load(std::memory_order_acquire);
    OnLane& own = worker.on[size_t(lane)];
    size_t& at = own.looked_at;
    if (own.looked != epoch) own.looked = epoch, at = 0;
    if (at == kAllSeen) return false;
    if (look_up(lanes_[size_t(lane)], epoch, task) && task.handing) {
        for (const auto& owned = task.handing->owned; at < owned.size();)
            if (const Handing::Owned& each = owned[at++]; each.scratch == worker.scratch) {
                task.id = each.task;
                return true;
            }
    }
    at = kAllSeen;
    return false;
}

// Finds a task that was taken but not published, of any node, since a whole team may be preempted.
bool Pool::take_again(Lane& lane, int node, Task& task) {
    const uint64_t epoch = lane.epoch.load(std::memory_order_acquire);
    const int from = lane.posted[epoch & 1].begin[node].load(std::memory_order_acquire);
    if (!look_up(lane, epoch, task) || task.at_home) return false;  // otherwise all fields are of this epoch
    for (int i = 0; i < task.tasks; ++i) {
        task.id = (from + i) % task.tasks;
        if (lane.claimed(task.id).load(std::memory_order_relaxed) != task.epoch + 1) return true;
    }
    return false;
}

// True if the task was published. A worker that was preempted after it took the task may find its number claimed by a
// later phase: then it sees that phase's epoch.
bool Pool::is_over(const Lane& lane, const Task& task) {
    return lane.claimed(task.id).load(std::memory_order_acquire) == task.epoch + 1 ||
           lane.epoch.load(std::memory_order_relaxed) != task.epoch;
}

bool Pool::any_work(const Lane& lane, int node) const {
    const auto waiting = [&](int n) {
        return std::any_of(std::begin(lane.next), std::end(lane.next),
                           [n](const Counter(&counters)[kMaxNodes]) { return has_left(counters[n]); });
    };
    return waiting(node) || std::any_of(orphans_.begin(), orphans_.end(), waiting);
}

bool Pool::any_open(const Lane& lane, int node) const {
    const auto& counters = lane.next[lane.epoch.load(std::memory_order_seq_cst) & 1];
    const auto waiting = [&](int n) { return has_left(counters[n]); };
    return waiting(node) || std::any_of(orphans_.begin(), orphans_.end(), waiting);
}

bool Pool::has_left(const Counter& counter) {
    const uint64_t seen = counter.value.load(std::memory_order_seq_cst);
    return (seen & kIndexMask) < (seen >> kIndexBits & kIndexMask);
}

}  // namespace proa
