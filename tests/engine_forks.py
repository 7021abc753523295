"""Engine processes that are forked from one that has imported torch, which takes seconds of CPU time in each.

An engine that a test starts in this way is its own process with its own session, streams, environment and exit code;
only its imports are shared. Never: engines of tests about the process itself, or with a GPU (they start as in service).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import programs
from proa.cli.main import main as run_proa
from proa.config.env import child_environ
from proa.engine.processes import process, worker

WORKER = ("-m", "proa.engine.processes.worker")
_NUMBER_BYTES = 8
_REQUEST_BYTES = 1 << 17


class EngineForks:
    """Starts the process to fork from when the first engine is asked for; `close` ends it.

    `subprocess`: what proa.engine.processes.process sees as the module of that name.
    """

    def __init__(self, requests: socket.socket | None = None) -> None:
        self.subprocess = SimpleNamespace(Popen=self._popen, PIPE=subprocess.PIPE)
        self._requests = requests
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def requests(self) -> socket.socket:
        """The socket of the process to fork from, which programs may inherit: see `proa`."""
        if self._requests is None:
            self._requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # It ends when the socket closes. Not by programs.python: the thread here may end before its program.
            command = [sys.executable, __file__, str(its.fileno())]
            self._process = subprocess.Popen(command, env=child_environ(), pass_fds=(its.fileno(),))
            its.close()
        return self._requests

    def proa(self, *argv: str) -> list[str]:
        """The command of `proa ARGV`, as programs.proa, with forked engines. Let it inherit `requests`."""
        return programs.python(__file__, str(self.requests.fileno()), *argv)

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _popen(
        self, command: Sequence[str], *, stdin: int, start_new_session: bool, env: dict[str, str], pass_fds: Any
    ) -> subprocess.Popen[bytes]:
        """Fork an engine, or start it in full if its environment is not the one in which torch was imported."""
        assert (tuple(command[1:3]), stdin, start_new_session) == (WORKER, subprocess.PIPE, True)
        if (fork := _Fork.of(self.requests, env, *pass_fds)) is not None:
            return cast("subprocess.Popen[bytes]", fork)
        return subprocess.Popen(command, stdin=stdin, start_new_session=start_new_session, env=env, pass_fds=pass_fds)


class _Fork:
    """What EngineProcess uses of a Popen, for a process that is not this one's child: a status comes by a pipe."""

    def __init__(self, pid: int, status: int, stdin: BinaryIO) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._status = status

    @classmethod
    def of(cls, requests: socket.socket, env: Mapping[str, str], descriptor: int) -> _Fork | None:
        """Ask for an engine; return None if it must be started in full."""
        its_stdin, stdin = os.pipe()
        status, its_status = os.pipe()
        request = json.dumps([dict(env), os.getcwd()]).encode()
        assert len(request) < _REQUEST_BYTES
        socket.send_fds(requests, [request], [its_stdin, 1, 2, descriptor, its_status])
        os.close(its_stdin)
        os.close(its_status)
        if pid := _number(status):
            return cls(pid, status, open(stdin, "wb"))  # EngineProcess closes it
        os.close(stdin)
        os.close(status)
        return None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        self.returncode = _number(self._status)
        os.close(self._status)
        return self.returncode


def _number(status: int) -> int:
    data = os.read(status, _NUMBER_BYTES)
    assert len(data) == _NUMBER_BYTES, "the process that engines are forked from has ended"
    return int.from_bytes(data, "little", signed=True)


def _tell(status: int, number: int) -> None:
    os.write(status, number.to_bytes(_NUMBER_BYTES, "little", signed=True))


def _lasting(env: Mapping[str, str]) -> dict[str, str]:
    """Without what pytest sets for each test, and torch in a process that imports its compiler."""
    return {name: value for name, value in env.items() if not name.startswith(("PYTEST_", "TORCHINDUCTOR_CACHE_DIR"))}


def serve(requests: socket.socket) -> int | None:
    """Fork an engine for each request until the test process closes its end. In a process that is to become an engine,
    return the number of the descriptor of its socket.

    Between this process and the engine is one that waits for the engine and tells how it ended.
    """
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 5)
        while _ended_child():
            pass
        if not request:
            return None
        environ, folder = json.loads(request)
        if _lasting(environ) != _lasting(os.environ):
            _tell(descriptors[-1], 0)
        elif os.fork() == 0:
            status = descriptors[-1]
            if pid := os.fork():
                for descriptor in (requests.fileno(), *descriptors[:-1]):
                    os.close(descriptor)
                _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os._exit(0)
            requests.close()
            own = _become_engine(environ, folder, descriptors[:-1])
            _tell(status, os.getpid())
            os.close(status)
            return own
        for descriptor in descriptors:
            os.close(descriptor)


def _ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _become_engine(environ: Mapping[str, str], folder: str, descriptors: list[int]) -> int:
    os.setsid()
    *streams, own = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    return own


def main() -> None:
    """Without further arguments, be the process to fork from; with ARGV, be `proa ARGV`."""
    sys.path.remove(str(Path(__file__).parent))  # the script's own folder, which is not in `python -m proa`'s path
    requests = socket.socket(fileno=int(sys.argv[1]))
    if argv := sys.argv[2:]:
        sys.argv = ["proa", *argv]
        process.subprocess = EngineForks(requests).subprocess  # type: ignore[attr-defined]
        sys.exit(run_proa())
    worker.message_loop()
    if (descriptor := serve(requests)) is not None:
        sys.argv = ["worker", str(descriptor)]
        worker.main()


if __name__ == "__main__":
    main()
