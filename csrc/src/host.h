// The resources that operations run on: the pool, this CPU's kernels, and per lane a workspace.
#pragma once

#include "isa/kernels.h"
#include "pool.h"
#include "workspace.h"

namespace proa {

class Outbox;

struct Host {
    Pool pool;
    Outbox* outbox = nullptr;  // flushed before a program begins
    const Kernels* kernels;    // this CPU's, one table per regime
    Workspace workspaces[kLanes];
    Regime regimes[kLanes] = {};  // set by a lane's caller before it runs operations

    Host(PoolOptions options, const Kernels* table) : pool(std::move(options)), kernels(table) {}

    const Kernels& kernels_of(int lane) const { return kernels[int(regimes[lane])]; }

    // Memory for one operation of a lane.
    std::byte* workspace(int lane, size_t bytes) {
        if (!workspaces[lane].fits(bytes)) pool.settle();
        return workspaces[lane].take(bytes);
    }
};

}  // namespace proa
