"""An interrupted test run leaves no program running, no matter how it was interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import programs

LIMIT_S = 60.0
PROBE = """
import os, subprocess, time
from pathlib import Path
import programs

def test_that_is_interrupted():
    with subprocess.Popen(programs.python("-c", "import time; time.sleep(600)"), start_new_session=True) as program:
        Path("pids.part").write_text(f"{os.getpid()} {program.pid}")
        Path("pids.part").rename("pids")
        program.wait()
"""


class Run:
    """`pytest -n1` in its own session, whose test waits for a program."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_probe.py").write_text(PROBE)
        tests = str(Path(programs.__file__).parent)
        self._pids = folder / "pids"
        self.controller = subprocess.Popen(
            programs.python("-m", "pytest", "-q", "-pxdist", "-n1", "-pno:cacheprovider", "test_probe.py"),
            cwd=folder, env={**os.environ, "PYTHONPATH": tests, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            start_new_session=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_until_it_waits(self) -> None:
        wait_for(self._pids.exists)
        self.worker, self.program = map(int, self._pids.read_text().split())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.controller.poll() is None:
            os.killpg(self.controller.pid, signal.SIGKILL)
        self.controller.wait(LIMIT_S)


def wait_for(condition: object) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_interrupted_run_leaves_no_program_behind(tmp_path: Path) -> None:
    """The runs wait at the same time: after its controller's SIGKILL, a worker of pytest-xdist takes five seconds."""
    interruptions = {
        "ctrl-c": lambda run: os.killpg(run.controller.pid, signal.SIGINT),
        "terminated": lambda run: run.controller.terminate(),
        "killed": lambda run: run.controller.kill(),
        "worker killed": lambda run: os.kill(run.worker, signal.SIGKILL),
    }
    with ExitStack() as stack:
        runs = {name: stack.enter_context(Run(tmp_path / name)) for name in interruptions}
        for name, interrupt in interruptions.items():
            runs[name].wait_until_it_waits()
            assert not ended(runs[name].program)
            interrupt(runs[name])
        for run in runs.values():
            wait_for(lambda run=run: ended(run.program))
            wait_for(lambda run=run: ended(run.worker))
            run.controller.wait(LIMIT_S)


def test_a_program_whose_starter_has_ended_does_not_start() -> None:
    command = programs.python("-c", "print('started')")
    starter = command.index(str(os.getpid()))
    done = subprocess.run([*command[:starter], "1", *command[starter + 1 :]], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has ended" in done.stderr
