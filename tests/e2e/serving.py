"""A real server as a process, and its engines. Never: tests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import programs
from engine_forks import EngineForks

T = TypeVar("T")


LIMIT_S = 60


@contextmanager
def serving(
    folder: Path, *argv: str, forks: EngineForks | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `proa serve --json` on a free port; yield the process and the report of the loaded model. forks: start the
    server's engine from there."""
    command = ("serve", str(folder), "--port=0", "--json", "--until-stdin-closes", *argv)
    with subprocess.Popen(
        forks.proa(*command) if forks else programs.proa(*command),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        pass_fds=(forks.requests.fileno(),) if forks else (),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert all(lines), process.communicate(timeout=LIMIT_S)[1]
        planned, loaded = map(json.loads, lines)
        assert planned["ready"] is None
        assert {**planned, "ready": loaded["ready"]} == loaded
        yield process, loaded


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def wait_for(condition: Callable[[], T]) -> T:
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return value


def engines_of(pid: int) -> list[int]:
    return [child for child in children_of(pid) if "proa.engine.processes.worker" in command_line(child)]


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found
