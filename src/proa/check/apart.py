"""Runs one path in a forked process, so that its memory, threads and pinned RAM end with it, and a crash of a kernel is
a finding about its path. Never: what is run.

The calling process must not have initialised CUDA, nor started torch's threads.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from proa.engine.building.compile_ahead import begin_forked, start_forked
from proa.errors import ProaError

log = logging.getLogger(__name__)

T = TypeVar("T")
_FORK = multiprocessing.get_context("fork")


class PathFailed(Exception):
    """The process ended without a result. The message says how."""


class OutOfTime(Exception):
    """The time limit of the check is reached."""


def run_apart(work: Callable[[], T], limit_s: float) -> T:
    """The result of `work`, which must be picklable. Raises its ProaError, PathFailed, or after limit_s OutOfTime, when
    the process has been killed."""
    mine, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(work, theirs, os.getpid()), name="path")
    start_forked(process)
    theirs.close()
    try:
        if not mine.poll(max(0.0, limit_s)):
            raise OutOfTime
        kind, result = pickle.loads(mine.recv_bytes())
    except EOFError:
        process.join()
        raise PathFailed(_ending(process.exitcode)) from None
    except BaseException:  # out of time, Ctrl-C, or a signal that ends this process
        process.kill()
        raise
    finally:
        mine.close()
        process.join()
    if kind == "result":
        found: T = result
        return found
    if kind == "ProaError":
        of, message, remedy, param = result
        raise of(message, remedy, param=param)
    raise PathFailed(result)


def _run(work: Callable[[], T], to: Connection, parent: int) -> None:
    """In the forked process: send ("result", result), ("ProaError", its parts) or ("error", text)."""
    begin_forked(parent)
    if sys.__stderr__ is not None:  # sys.stderr may be a caller's, without a descriptor
        faulthandler.enable(sys.__stderr__)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    found: tuple[str, object]
    try:
        found = "result", work()
    except ProaError as error:
        found = "ProaError", (type(error), error.message, error.remedy, error.param)
    except Exception as error:
        log.debug("A path failed.", exc_info=True)
        found = "error", f"{type(error).__name__}: {error}"
    to.send_bytes(pickle.dumps(found))
    os._exit(0)  # the path's threads and processes end with this one, without being waited for


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
