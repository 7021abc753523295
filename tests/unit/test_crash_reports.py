"""The summary of a test run says how a worker crashed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import crash_reports

PROBE = """
import ctypes, os, signal, threading

def crash_below_a_name():
    {crash}

def test_a():
    pass

def test_that_crashes():
    thread = threading.Thread(target=crash_below_a_name)
    thread.start()
    thread.join()
"""
CRASHES = [
    ("ctypes.string_at(1)", "was ended by SIGSEGV", "in crash_below_a_name"),
    ("os.abort()", "was ended by SIGABRT", "in crash_below_a_name"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", "It left no stacks."),
    ("os._exit(3)", "ended with exit code 3", "It left no stacks."),
]


def run(folder: Path, crash: str) -> str:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_probe.py").write_text(PROBE.format(crash=crash))
    command = [sys.executable, "-m", "pytest", "-q", "-pxdist", "-pcrash_reports", "-n1", "-pno:cacheprovider", "."]
    tests, temporary = str(Path(crash_reports.__file__).parent), folder / "tmp"
    temporary.mkdir()
    environ = {**os.environ, "PYTHONPATH": tests, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert not [*temporary.glob("crashes-*")]
    return done.stdout


@pytest.mark.parametrize(("crash", "ending", "stacks"), CRASHES, ids=["segv", "abort", "kill", "exit"])
def test_a_crash_is_in_the_summary(tmp_path: Path, crash: str, ending: str, stacks: str) -> None:
    _, failures, summary = run(tmp_path, crash).partition("= FAILURES =")
    assert failures
    assert f"worker gw0 {ending}" in summary
    assert stacks in summary
