// The resources that operations run on: the pool, this CPU's kernels, and per lane a workspace.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "isa/kernels.h"
#include "pool.h"
#include "workspace.h"

namespace proa {

class Outbox;

struct Host {
    Pool pool;
    Outbox* outbox = nullptr;           // flushed before a program begins
    const Kernels* kernels;             // this CPU's, one table per regime
    std::vector<Workspace> workspaces;  // by lane
    std::vector<Regime> regimes;        // by lane; set by its caller before it runs operations
    std::atomic<bool> reads_ahead{false};

    Host(PoolOptions options, const Kernels* table)
        : pool(std::move(options)), kernels(table), workspaces(size_t(pool.lanes())), regimes(size_t(pool.lanes())) {}

    const Kernels& kernels_of(int lane) const { return kernels[int(regimes[size_t(lane)])]; }

    // Memory for one operation of a lane.
    std::byte* workspace(int lane, size_t bytes) {
        Workspace& own = workspaces[size_t(lane)];
        if (!own.fits(bytes)) pool.settle();
        return own.take(bytes);
    }
};

// Throws Error (argument) unless the pool has this lane.
inline void require_lane(const Host& host, int lane) {
    if (lane < 0 || lane >= host.pool.lanes())
        throw Error(PROA_ERROR_ARGUMENT, "Lane " + std::to_string(lane) +
                                             " does not exist: the pool was created with " +
                                             std::to_string(host.pool.lanes()) + " lanes, numbered from 0.");
}

}  // namespace proa
