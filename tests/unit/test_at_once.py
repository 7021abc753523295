"""Tests in several processes: a test marked `alone` runs while no other test runs."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import at_once

TESTS = Path(__file__).parents[1]
WORKER = """
import sys, time
from pathlib import Path
import at_once

at_once.__file__, at_once.FOLDER = (Path(sys.argv[1]) / name for name in ("turn", "running"))
alone, log = sys.argv[2] == "alone", Path(sys.argv[1]) / "log"
for _ in range(int(sys.argv[3])):
    with at_once.beside_others(alone), log.open("a") as file:
        file.write(f"+{sys.argv[2]}\\n"), file.flush()
        time.sleep(0.005)
        file.write(f"-{sys.argv[2]}\\n"), file.flush()
"""


FORKING = """
import os, signal, sys
from pathlib import Path
import at_once

at_once.__file__, at_once.FOLDER = (Path(sys.argv[1]) / name for name in ("turn", "running"))
with at_once.beside_others(True):
    if not (left := os.fork()):
        signal.pause()
print(left, flush=True)
"""


def outside() -> dict[str, str]:
    """The environment of a run that is not inside a test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def start(folder: Path, kind: str, tests: int, inside: bool = False) -> subprocess.Popen[bytes]:
    """A process of a run that has `tests` tests of this kind; `inside` a test of another run."""
    for name in ("turn", "running"):
        (folder / name).touch()
    others = outside()
    environment = {**others, **({"PYTEST_CURRENT_TEST": "test_that_runs_pytest"} if inside else {})}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), kind, str(tests)], cwd=TESTS, env=environment)


def test_no_test_runs_beside_one_marked_alone(tmp_path: Path) -> None:
    started = [start(tmp_path, kind, 20) for kind in ("alone", "beside", "beside")]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    running: list[str] = []
    most = 0
    for line in (tmp_path / "log").read_text().splitlines():
        if line[0] == "-":
            running.remove(line[1:])
            continue
        running.append(line[1:])
        assert running == ["alone"] or "alone" not in running
        most = max(most, len(running))
    assert not running
    assert most == 2, "others do run beside each other"


def test_pytest_inside_a_test_does_not_wait_for_one_that_waits_for_that_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("turn", "running"):
        (tmp_path / name).touch()
    monkeypatch.setattr(at_once, "__file__", tmp_path / "turn")
    monkeypatch.setattr(at_once, "FOLDER", tmp_path / "running")
    monkeypatch.setattr(at_once, "INSIDE_A_TEST", False)
    with at_once.beside_others(alone=False):
        waiting = start(tmp_path, "alone", 1)
        turn = os.open(tmp_path / "turn", os.O_RDONLY)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(0.01)
        os.close(turn)
        inside = start(tmp_path, "beside", 2, inside=True)
        try:
            assert inside.wait(20) == 0
            assert waiting.poll() is None
        finally:
            inside.kill()
    assert waiting.wait(60) == 0


def test_a_process_that_a_test_forked_does_not_keep_others_waiting(tmp_path: Path) -> None:
    for name in ("turn", "running"):
        (tmp_path / name).touch()
    others = outside()
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, cwd=TESTS, env=others, stdout=subprocess.PIPE) as forking:
        assert forking.stdout is not None
        left = int(forking.stdout.readline())
        try:
            assert start(tmp_path, "beside", 1).wait(20) == 0
        finally:
            os.kill(left, signal.SIGKILL)
