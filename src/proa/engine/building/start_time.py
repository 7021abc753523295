"""Whether a start goes on with what may also be done later. The one clock that decides so, made in one place and handed
on as a value: ranks whose graphs exchange tensors must capture the same ones, so the first of them will decide for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WARM_UP_S = 15.0  # steps that have not begun by then are left to the requests that first need them


def within(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Callable[[], bool]:
    """Start now; the result is true until more than `seconds` seconds have passed."""
    end = clock() + seconds
    return lambda: clock() <= end
