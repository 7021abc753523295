// What an operation runs on: the pool, the kernels of this CPU, and a lane with its memory.
#pragma once

#include "isa/kernels.h"
#include "pool.h"
#include "workspace.h"

namespace proa {

class Outbox;

struct Host {
    Pool pool;
    Outbox* outbox = nullptr;  // emptied before a program begins
    const Kernels* kernels;
    Workspace workspaces[kLanes];

    Host(PoolOptions options, const Kernels* table) : pool(std::move(options)), kernels(table) {}

    // Memory for one operation of a lane.
    std::byte* workspace(int lane, size_t bytes) {
        if (!workspaces[lane].fits(bytes)) pool.settle();
        return workspaces[lane].take(bytes);
    }
};

}  // namespace proa
