"""`proa serve` start-up: the order of its first steps, downloads in worker threads stop with it, and the log levels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proa.cli.begin import begin
from proa.cli.start import _interruptible
from proa.config.options import EngineOptions, ServeOptions, ServerOptions
from proa.config.parse import from_keywords
from proa.errors import ShuttingDown, UsageError
from quick_plan import ram_of
from tiny import make_tiny


def test_a_download_stops_after_an_interrupt() -> None:
    seen: list[tuple[str, int, int]] = []
    with _interruptible(lambda *report: seen.append(report)) as report:
        report("fetching", 1, 2)
    with pytest.raises(ShuttingDown):
        report("fetching", 2, 2)
    assert seen == [("fetching", 1, 2)]


def test_ram_is_measured_before_the_engines_process_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process imports torch, which would keep a core busy; and a model that is not here is fetched before both."""
    events: list[str] = []
    folder = make_tiny("qwen3-moe", tmp_path / "m")
    monkeypatch.setattr("proa.plan.prepare.measure_ram", lambda *_, **__: events.append("measured") or ram_of())
    monkeypatch.setattr("proa.engine.processes.early.EngineProcess", lambda: Recorded(events))
    options = ServeOptions(server=ServerOptions(port=0))
    with begin(str(folder), options) as begun:
        assert begun.listener.getsockname()[1] > 0
        assert begun.prepared is not None
        events.append("imports")
    assert events == ["measured", "begun", "imports", "ended"]
    events.clear()
    monkeypatch.setattr("proa.cli.begin.open_if_here", lambda model, asked: None)
    with begin("org/name", options) as begun:
        assert begun.prepared is None
    assert events == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_dir": "file/kept", "prefix_cache_disk": 1 << 30}, "cannot be created in .*file"),
        ({"prefix_cache_dir": "~no-such-user/kept", "prefix_cache_disk": 1 << 30}, "there is no such home folder"),
        ({"prefix_cache_dir": "file", "prefix_cache_disk": 1 << 30}, "--prefix-cache-dir, .*file, cannot be read"),
        ({"save_expert_counts": "none/counts"}, "--save-expert-counts .*counts cannot be written"),
    ],
)
def test_paths_that_cannot_be_used_are_refused_before_the_port_opens(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("proa.cli.begin.bind", lambda host, port: pytest.fail("the port was opened"))
    with (
        pytest.raises(UsageError, match=message),
        begin("model", ServeOptions(engine=from_keywords(EngineOptions, **options))),
    ):
        pass


class Recorded:
    def __init__(self, events: list[str]) -> None:
        self._events = events
        events.append("begun")

    def end(self) -> None:
        self._events.append("ended")


LOGGING = """
import logging
from proa.obs.console import console_err
from proa.obs.log import setup_logging
setup_logging({level!r}, console_err())
for name in ("proa.engine", "uvicorn.error"):
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger(name), level)("%s says %s", name, level)
"""


@pytest.mark.parametrize(
    ("level", "proa", "others"),
    [("debug", 3, 3), ("info", 2, 1), ("warning", 1, 1), ("error", 0, 1)],
)
def test_log_levels(level: str, proa: int, others: int) -> None:
    code = LOGGING.format(level=level)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert sum("proa.engine: proa.engine says" in line for line in lines) == proa
    assert sum("uvicorn.error: uvicorn.error says" in line for line in lines) == others
