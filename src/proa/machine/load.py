"""Measures how many CPUs other programs keep busy, to judge measurements made at the same time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from proa.machine.files import read_text

# The machine counts as busy above the larger of both. The kernel counts CPU time in ticks of 10 ms, so that an idle
# machine may show a tenth of a CPU over 0.3 s; and one core of many uses little of the memory bandwidth.
LEAST_BUSY_CPUS, LEAST_BUSY_SHARE = 0.25, 0.05
SAMPLE_S = 0.25

_BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU use by other programs, and by other virtual machines on the same host, over an interval."""

    others: float | None  # mean number of CPUs that they kept busy; None if the kernel does not report it
    cpus: int  # CPUs of this machine

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others > max(LEAST_BUSY_CPUS, LEAST_BUSY_SHARE * self.cpus)

    def __str__(self) -> str:
        if self.others is None:
            return "the CPU use of other programs is unknown"
        return f"other programs kept {self.others:.1f} of {self.cpus} CPUs busy"


@dataclass(frozen=True)
class _CpuTimes:
    clock_s: float
    own_s: float  # CPU time of this process
    cpus_s: float  # CPU time of all processes; 0 if the kernel does not report it
    cpus: int


class LoadMeter:
    """Measures the load from its construction on. CPU time of this process's children counts as other programs'."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._begin = _cpu_times(root)

    def load(self) -> Load:
        """Return the load from construction until now."""
        begin, end = self._begin, _cpu_times(self._root)
        seconds, all_s = end.clock_s - begin.clock_s, end.cpus_s - begin.cpus_s
        if not end.cpus_s or seconds <= 0:  # sandboxes may show zeros, or hide /proc/stat
            return Load(None, end.cpus)
        return Load(max(0.0, all_s - (end.own_s - begin.own_s)) / seconds, end.cpus)


def load_now(seconds: float = SAMPLE_S) -> Load:
    """Measure the load over the next `seconds`; the calling thread sleeps meanwhile."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.load()


def _cpu_times(root: Path) -> _CpuTimes:
    lines = (read_text(root / "proc/stat") or "").splitlines()
    each = [line.split()[1:] for line in lines if line.startswith("cpu")]
    ticks = sum(int(each[0][i]) for i in _BUSY if i < len(each[0])) if each else 0
    return _CpuTimes(time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"), max(1, len(each) - 1))
