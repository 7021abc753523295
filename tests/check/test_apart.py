"""Paths of `proa check` in processes of their own."""

from __future__ import annotations

import ctypes
import signal
import time

import pytest

from proa.check.apart import OutOfTime, PathFailed, run_apart
from proa.cli.check import CheckCommand
from proa.config.field import declarations


def test_an_interrupted_check_does_not_wait_for_its_path() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, began_s = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_apart(lambda: time.sleep(15), 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < 10


def test_a_path_beyond_the_time_limit_is_ended() -> None:
    began_s = time.monotonic()
    with pytest.raises(OutOfTime):
        run_apart(lambda: time.sleep(15), 0.1)
    assert time.monotonic() - began_s < 10


def test_a_path_may_have_the_longest_time_limit() -> None:
    """Polling a pipe takes no more than 24 days."""
    longest_s = declarations(CheckCommand)["time_limit"].info.high
    assert longest_s is not None
    assert run_apart(lambda: 1, longest_s) == 1


def test_a_crashed_path_prints_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    def crash() -> None:
        ctypes.string_at(1)

    with pytest.raises(PathFailed, match="ended by SIGSEGV"):
        run_apart(crash, 60.0)
    assert "in crash" in capfd.readouterr().err
