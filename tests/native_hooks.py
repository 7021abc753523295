"""Hooks that the native library of a checkout has for tests: csrc/tests/hooks/hooks.h."""

from __future__ import annotations

from ctypes import c_void_p

from proa.native.library import library
from proa.native.pool import Pool


def kill_worker(pool: Pool) -> None:
    """End the thread of one worker, as if it had died."""
    library().bind({"proa_hook_kill_worker": (c_void_p,)}).proa_hook_kill_worker(pool.handle)
