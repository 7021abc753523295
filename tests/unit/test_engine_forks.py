"""Engines forked from a process that has imported torch end as processes of their own do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine_forks import WORKER, EngineForks
from proa.config.env import child_environ


@pytest.fixture(scope="module")
def forks() -> Iterator[EngineForks]:
    forks = EngineForks()
    yield forks
    forks.close()


def begin(forks: EngineForks, **environ: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    own, its = socket.socketpair()
    process = forks.subprocess.Popen(
        [sys.executable, *WORKER, str(its.fileno())],
        stdin=subprocess.PIPE, start_new_session=True, env={**child_environ(), **environ}, pass_fds=(its.fileno(),),
    )  # fmt: skip
    its.close()
    return process, own


def test_it_ends_when_its_frontend_does(forks: EngineForks) -> None:
    process, own = begin(forks)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    own.close()
    assert process.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.stdin.close()


def test_it_ends_when_its_input_closes(forks: EngineForks) -> None:
    process, own = begin(forks)
    process.stdin.close()
    assert process.wait() == 0
    own.close()


def test_a_killed_one_says_so(forks: EngineForks) -> None:
    process, own = begin(forks)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # does nothing
    process.stdin.close()
    own.close()


def test_another_environment_is_imported_anew(forks: EngineForks) -> None:
    """What torch reads when it is imported must be what the engine was given."""
    process, own = begin(forks, OMP_NUM_THREADS="3")
    assert isinstance(process, subprocess.Popen)
    environ = Path(f"/proc/{process.pid}/environ")
    while not environ.read_bytes():  # Popen returns during exec, a moment before the kernel shows the new environment
        time.sleep(0.001)
    assert b"OMP_NUM_THREADS=3" in environ.read_bytes().split(b"\0")
    process.kill()
    process.communicate()
    own.close()


def test_a_thread_that_ends_does_not_end_the_others() -> None:
    """The process to fork from may be started by any thread, and outlives it."""
    forks = EngineForks()
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            process, own = thread.submit(begin, forks).result()
        assert not isinstance(process, subprocess.Popen)
        own.close()
        assert process.wait() == 0
        process.stdin.close()
    forks.close()
