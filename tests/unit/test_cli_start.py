"""`proa serve` start-up: downloads in worker threads stop with it, and the log levels."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proa.cli.start import _interruptible
from proa.errors import ShuttingDown


def test_a_download_stops_after_an_interrupt() -> None:
    seen: list[tuple[str, int, int]] = []
    with _interruptible(lambda *report: seen.append(report)) as report:
        report("fetching", 1, 2)
    with pytest.raises(ShuttingDown):
        report("fetching", 2, 2)
    assert seen == [("fetching", 1, 2)]


LOGGING = """
import logging
from proa.obs.log import setup_logging
setup_logging({level!r})
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
