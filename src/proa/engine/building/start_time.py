"""Decides by time whether a start continues with work that may also be done later. The clock is made in one place and
passed on as a value: ranks whose graphs exchange tensors must capture the same graphs, so the first rank will decide
for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WARM_UP_S = 15.0  # steps that have not begun by then are left to the requests that first need them


def within(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Callable[[], bool]:
    """Start now; the result is true until more than `seconds` seconds have passed."""
    end = clock() + seconds
    return lambda: clock() <= end
