"""Runs `proa serve` as a child process that ends with its parent."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proa.config.env import child_environ
from proa.errors import EngineDead, ProaError

_STOP_S = 20.0


@contextmanager
def server_process(argv: Sequence[str], *, kill: bool = False) -> Iterator[dict[str, Any]]:
    """Run `proa serve ARGV` until the block ends; yield its report (cli/report.py) when the model is ready. kill: end
    it by SIGKILL, as if the machine had failed.

    The child shares stderr. It has its own session, so that Ctrl-C reaches only the parent, and it exits when its stdin
    closes, so that it never outlives the parent, however that dies. Raises ProaError if the server cannot start.
    """
    command = [sys.executable, "-m", "proa.cli.main", "serve", *argv, "--json", "--until-stdin-closes"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environ(log="warning"),
        start_new_session=True,
    )
    try:
        yield _ready_report(process)
    finally:
        if kill:
            _kill(process)
        else:
            _stop(process)


def _ready_report(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read reports of serve --json until the second one, printed when the model is loaded."""
    assert process.stdout is not None  # a pipe, by construction
    for line in process.stdout:
        report: dict[str, Any] = json.loads(line)
        if report["ready"] is not None:
            return report
    raise _StartError(process.wait())


class _StartError(ProaError):
    """Raised if the child exits before it is ready; the child has printed the reason on the shared stderr."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("The server could not start; see its message above.")
        self.exit_code = exit_code if exit_code > 0 else EngineDead.exit_code


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the server, and wait until its engine, which ends with it, is gone and has released its memory."""
    children = [
        int(child)
        for tasks in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]
    with process:
        process.kill()
    end_s = time.monotonic() + _STOP_S
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end_s:
        time.sleep(0.01)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with process:  # on exit: closes all pipes and waits
        assert process.stdin is not None  # a pipe, by construction
        process.stdin.close()
        for harder in (process.terminate, process.kill):
            try:
                process.wait(_STOP_S)
                return
            except subprocess.TimeoutExpired:
                harder()
