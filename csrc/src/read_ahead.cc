#include "read_ahead.h"

#include <unistd.h>

#include <algorithm>

namespace proa {
namespace {

constexpr size_t kLeastCacheBytes = 256 << 10;  // per core, if the system does not report it

size_t cache_bytes() {
    const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return std::max(found > 0 ? size_t(found) : 0, kLeastCacheBytes);
}

}  // namespace

void Pieces::cut(const Experts& experts, const std::vector<int>& ids, int threads) {
    const Matrix& w = *experts.gate_up;
    // Half of the cache: two workers may share a core.
    static const size_t room_bytes = cache_bytes() / 2;
    const size_t fit = std::max<size_t>(1, room_bytes * size_t(threads) / w.matrix_bytes());
    experts_ = &experts;
    ids_.assign(ids.begin(), ids.begin() + ptrdiff_t(std::min(fit, ids.size())));
    const int unit = has_gate(experts.activation) ? 2 : 1;
    tasks_ = RowTasks(w, streamed_step(w, unit, 1, int(ids.size()), threads), int(ids_.size()));
    const size_t count = size_t(tasks_.begin[tasks_.nodes]);
    if (count > room_) readers_ = std::make_unique<std::atomic<const std::byte*>[]>(room_ = count);
    for (size_t i = 0; i < count; ++i) readers_[i].store(nullptr, std::memory_order_relaxed);
    over_.store(false, std::memory_order_release);
}

void Pieces::read(int task, const std::byte* scratch) const {
    const RowTasks::Place at = tasks_.place(task);
    const Matrix& w = *experts_->gate_up;
    const uint8_t* begin = w.panel(ids_[size_t(at.repeat)], at.node, at.first);
    const size_t bytes = size_t(at.end - at.first) * w.layout.panel_bytes;
    if (over_.load(std::memory_order_relaxed)) return;
    readers_[task].store(scratch, std::memory_order_relaxed);
    for (size_t part = 0; !over_.load(std::memory_order_relaxed) && fetch_part(begin, bytes, part);) ++part;
}

bool Pieces::has(int id) const { return std::find(ids_.begin(), ids_.end(), id) != ids_.end(); }

const std::byte* Pieces::reader(int id, int node, int panel) const {
    const auto found = std::find(ids_.begin(), ids_.end(), id);
    if (found == ids_.end()) return nullptr;
    const int repeat = int(found - ids_.begin());
    const int task = tasks_.begin[node] + repeat * tasks_.chunks[node] + (panel - tasks_.first[node]) / tasks_.step;
    return readers_[task].load(std::memory_order_relaxed);
}

ReadAhead::ReadAhead(Host& host) : host_(host) {
    if (host.reads_ahead.exchange(true))
        throw Error(PROA_ERROR_ARGUMENT, "Another doorbell of this pool reads ahead, and only one can.");
}

ReadAhead::~ReadAhead() {
    end();
    host_.pool.settle();  // a late worker may still read pieces
    host_.reads_ahead.store(false);
}

void ReadAhead::begin(const Experts& experts, const std::vector<int>& ids) {
    end();
    if (ids.empty()) return;
    if (++turn_ % kTurns == 0) host_.pool.settle();  // from here on all pieces are used again
    Pieces& pieces = turns_[turn_ % kTurns];
    pieces.cut(experts, ids, host_.pool.threads());
    Phase phase{};
    pieces.tasks().describe(phase);
    phase.context = &pieces;
    phase.run = [](const void* context, int task, std::byte* scratch) {
        static_cast<const Pieces*>(context)->read(task, scratch);
    };
    host_.pool.post(phase);
}

void ReadAhead::end() {
    turns_[turn_ % kTurns].end();
    host_.pool.withdraw();
}

const Pieces* ReadAhead::of(const Experts& experts) const {
    const Pieces& last = turns_[turn_ % kTurns];
    return last.experts() == &experts ? &last : nullptr;
}

void hand_out(const Pieces& pieces, const RowTasks& tasks, const std::vector<int>& experts, Handing& handing) {
    handing.owned.clear();
    handing.order.resize(size_t(tasks.begin[tasks.nodes]));
    for (int node = 0; node < tasks.nodes; ++node) {
        int first = tasks.begin[node], last = tasks.begin[node + 1];
        for (int task = first, end = last; task < end; ++task) {
            const RowTasks::Place at = tasks.place(task);
            const std::byte* reader = pieces.reader(experts[size_t(at.repeat)], node, at.first);
            if (reader) handing.owned.push_back({reader, task});
            handing.order[size_t(reader ? --last : first++)] = task;
        }
    }
}

}  // namespace proa
