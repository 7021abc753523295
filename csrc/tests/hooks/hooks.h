// Functions for tests that libraries built in a checkout export beside proa/native.h; a wheel's library has none of
// them.
#ifndef PROA_HOOKS_H
#define PROA_HOOKS_H

#include "proa/native.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ends the thread of the next worker that polls, as if it had died.
PROA_API int proa_hook_kill_worker(proa_pool* pool);

#ifdef __cplusplus
}
#endif

#endif  // PROA_HOOKS_H
