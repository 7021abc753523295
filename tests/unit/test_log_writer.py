"""Log lines are written by a thread: a reader that stalls stops nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import time

import pytest

from proa.obs.log_writer import LogWriter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("proa.test", logging.INFO, __file__, 1, "%s", (text,), None)


def test_lines_arrive_in_order() -> None:
    read, write = os.pipe()
    handler = LogWriter(write)
    for text in ("one", "two", "dr\udce4i"):
        handler.handle(record(text))
    handler.flush()
    assert os.read(read, 100) == b"one\ntwo\ndr\\udce4i\n"


def test_a_stalled_reader_costs_lines_and_nothing_else() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    handler = LogWriter(write, most_lines=10)
    for i in range(500):
        handler.handle(record(f"{i} " + "x" * 1000))
    began = time.monotonic()
    handler.flush()
    assert 0.9 < time.monotonic() - began < 5  # it gives up after a second
    os.set_blocking(read, False)
    seen = b""
    end = time.monotonic() + 30
    while b"after" not in seen:
        assert time.monotonic() < end
        try:
            seen += os.read(read, 1 << 20)
        except BlockingIOError:
            handler.handle(record("after"))
            time.sleep(0.01)
    lines = seen.decode().splitlines()
    numbers = [int(line.split()[0]) for line in lines if line.endswith("xx")]
    assert numbers == sorted(numbers)
    assert 10 <= len(numbers) < 100
    said = [line for line in lines if line.endswith(" log lines were dropped: nothing read them.)")]
    assert sum(int(line[1:].split()[0]) for line in said) == 500 - len(numbers)


def test_a_reader_that_left_stops_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    handler = LogWriter(write)
    handler.handle(record("unread"))
    began = time.monotonic()
    handler.flush()
    assert time.monotonic() - began < 0.5


def test_arguments_that_cannot_be_formatted_do_not_reach_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    read, write = os.pipe()
    handler = LogWriter(write)
    handler.handle(logging.LogRecord("proa.test", logging.INFO, __file__, 1, "%s", (Broken(),), None))
    handler.handle(record("next"))
    handler.flush()
    assert os.read(read, 100) == b"next\n"
    assert "no text" in capsys.readouterr().err


def test_lines_that_come_fast_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    sizes, real = [], os.write

    def counting(descriptor: int, data: bytes) -> int:
        if descriptor == write:
            sizes.append(len(data))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", counting)
    handler = LogWriter(write)
    began = time.monotonic()
    for i in range(300):
        handler.handle(record(f"{i:03}"))
    handler.flush()
    assert os.read(read, 1 << 16) == b"".join(b"%03d\n" % i for i in range(300))
    assert len(sizes) <= 3 + (time.monotonic() - began) / 0.02
