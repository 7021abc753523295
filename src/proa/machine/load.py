"""How many CPUs other programs keep busy while something is measured. Never: the measurement itself."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from proa.machine.files import read

# From here on other programs count. The kernel counts time in ticks of 10 ms for each CPU, so that a quiet machine
# shows a tenth of a CPU in 0.3 s; and one core among many takes little of the memory's bandwidth.
LEAST_BUSY_CPUS, LEAST_BUSY_SHARE = 0.25, 0.05
SAMPLE_S = 0.25

_BUSY = (0, 1, 2, 5, 6, 7)  # of a line of /proc/stat: user, nice, system, irq, softirq, steal


class Load(msgspec.Struct, frozen=True):
    """What other programs, and other machines on the same host, did over some seconds."""

    others: float | None  # CPUs that they kept busy, the mean; None: the kernel does not say
    cpus: int  # that the machine has

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others > max(LEAST_BUSY_CPUS, LEAST_BUSY_SHARE * self.cpus)

    def __str__(self) -> str:
        if self.others is None:
            return "it is not known what other programs did"
        return f"other programs kept {self.others:.1f} of {self.cpus} CPUs busy"


@dataclass(frozen=True)
class _Moment:
    clock_s: float
    own_s: float  # CPU time of this process
    cpus_s: float  # and of everything on this machine; 0 where the kernel does not say
    cpus: int


class LoadMeter:
    """Measures from its making on. CPU time of this process's children counts as that of others."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._begin = _moment(root)

    def load(self) -> Load:
        begin, end = self._begin, _moment(self._root)
        seconds, all_s = end.clock_s - begin.clock_s, end.cpus_s - begin.cpus_s
        if not end.cpus_s or seconds <= 0:  # sandboxes show zeros, or no such file
            return Load(None, end.cpus)
        return Load(max(0.0, all_s - (end.own_s - begin.own_s)) / seconds, end.cpus)


def load_now(seconds: float = SAMPLE_S) -> Load:
    """What other programs do in the next `seconds`, in which the calling thread sleeps."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.load()


def _moment(root: Path) -> _Moment:
    lines = (read(root / "proc/stat") or "").splitlines()
    each = [line.split()[1:] for line in lines if line.startswith("cpu")]
    ticks = sum(int(each[0][i]) for i in _BUSY if i < len(each[0])) if each else 0
    return _Moment(time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"), max(1, len(each) - 1))
