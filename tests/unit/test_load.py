"""The number of CPUs that other programs keep busy: from /proc/stat, minus this process's own CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proa.machine.load import Load, LoadMeter, load_now

TICKS = os.sysconf("SC_CLK_TCK")


def write_stat(root: Path, busy_s: float, cpus: int = 4, idle_s: float = 0.0) -> None:
    """Write /proc/stat with the busy seconds divided equally over user, system, softirq and steal; idle, iowait and
    guest must not count."""
    part = round(busy_s * TICKS / 4)
    line = f"{part} 0 {part} {round(idle_s * TICKS)} 77 0 {part} {part} 55 0"
    each = "\n".join(f"cpu{i} 1 1 1 1 1 1 1 1 1 1" for i in range(cpus))
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {line}\n{each}\nintr 5 0\nctxt 9\n")


def test_own_cpu_time_is_not_counted_as_others(tmp_path: Path) -> None:
    write_stat(tmp_path, 100)
    meter = LoadMeter(tmp_path)
    begin, own = time.perf_counter(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    seconds = time.perf_counter() - begin
    write_stat(tmp_path, 100 + 0.2 + 3 * seconds, idle_s=9)
    load = meter.load()
    assert load.cpus == 4
    assert load.others == pytest.approx(3, rel=0.2)
    assert load.busy
    assert str(load) == f"other programs kept {load.others:.1f} of 4 CPUs busy"


@pytest.mark.parametrize("stat", [None, "", "cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0"])
def test_unknown_load_is_not_busy(stat: str | None, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    if stat is not None:
        (tmp_path / "proc/stat").write_text(stat)
    load = LoadMeter(tmp_path).load()
    assert load.others is None
    assert not load.busy
    assert "unknown" in str(load)


@pytest.mark.parametrize(
    ("others", "cpus", "busy"),
    [(0.1, 2, False), (0.2, 2, False), (0.3, 2, True), (1.0, 2, True), (1.0, 64, False), (4.0, 64, True)],
)
def test_a_small_load_is_not_busy(others: float, cpus: int, busy: bool) -> None:
    assert Load(others, cpus).busy is busy


@pytest.mark.alone
def test_the_load_of_another_program_is_measured() -> None:
    """Measured in real time: a busy loop in another process takes a core, or its share of one."""
    loop = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(loop, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert (load_now(0.5).others or 0) > 0.3
        finally:
            other.kill()
