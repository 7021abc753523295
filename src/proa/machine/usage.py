"""What this process has used of the machine. Never: what there is of it (probe.py)."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most RAM that was ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_age_s() -> float:
    """Seconds since this process began, its interpreter's own start included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the system's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
