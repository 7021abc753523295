"""The engine's process as its frontend holds it: spawning, ending, waiting. Never: messages, asyncio's subprocesses,
which need a running event loop before the process can begin."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from proa.config.env import child_environ

WORKER = ("-m", "proa.engine.processes.worker")


class EngineProcess:
    """A running engine process and the frontend's end of its socket. It waits for Start, and ends when its standard
    input closes, so with this process at the latest."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        """command: Python's arguments, to which the number of the engine's end of the socket is added."""
        self.socket, its = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(its.fileno())],
                stdin=subprocess.PIPE, start_new_session=True, env=child_environ(), pass_fds=(its.fileno(),),
            )  # fmt: skip
        except BaseException:
            self.socket.close()
            raise
        finally:
            its.close()
        self._exited: Future[int] = Future()
        self._exited.set_running_or_notify_cancel()  # an awaiting task that is cancelled must not cancel it
        # A thread, because the kernel may have no pidfd, and asyncio may not be running yet.
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        return await asyncio.wrap_future(self._exited)

    def kill(self) -> None:
        self._process.kill()

    def close_stdin(self) -> None:
        """Close the pipe whose end ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Kill the process, wait until it has ended, and close what belongs to it. Idempotent."""
        self.kill()
        self._exited.result()
        self.close_stdin()
        self.socket.close()

    def _wait(self) -> None:
        self._exited.set_result(self._process.wait())
