"""Resource use of this process: peak memory and age."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the peak resident set size, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_age_s() -> float:
    """Return the seconds since this process was started, which includes the interpreter's start-up."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # start time since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
