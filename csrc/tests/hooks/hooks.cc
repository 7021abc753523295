#include "hooks.h"

#include "error.h"
#include "handles.h"

extern "C" int proa_hook_kill_worker(proa_pool* pool) {
    return proa::guarded([&] {
        proa::require(pool, "The pool is a null pointer.");
        pool->host.pool.kill_worker_for_test();
    });
}
