"""A plugin of pytest: the summary of a run says how a worker of pytest-xdist crashed, with its stacks. xdist names only
the test under way, and what faulthandler prints is lost among the dots. Never: tests, crashes of programs under test.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

END_S = 10.0  # for a worker to end once its pipe has closed
FOLDER = pytest.StashKey[Path]()  # of the controller: the workers' files
CRASHES = pytest.StashKey[list[tuple[str, str]]]()  # how each worker ended, its stacks


@pytest.hookimpl(trylast=True)  # after pytest's own plugin, which has stacks printed
def pytest_configure(config: pytest.Config) -> None:
    if given := getattr(config, "workerinput", None):
        faulthandler.enable(os.open(given["crash_file"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(FOLDER, None):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    if FOLDER not in stash:
        stash[FOLDER], stash[CRASHES] = Path(tempfile.mkdtemp(prefix="crashes-")), []
    node.workerinput["crash_file"] = str(stash[FOLDER] / node.gateway.id)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any, error: object | None) -> None:
    if error is not None:
        file = Path(node.workerinput["crash_file"])
        stacks = file.read_text() if file.exists() else ""
        ending = f"worker {node.gateway.id} {_ended(node.gateway._io.popen)}"
        node.config.stash[CRASHES].append((ending, stacks or "It left no stacks."))


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "still runs, but has closed its pipe"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for ending, stacks in config.stash.get(CRASHES, []):
        terminalreporter.section(ending)
        terminalreporter.write_line(stacks)
