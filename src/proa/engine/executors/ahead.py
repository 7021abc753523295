"""Decides how many parts of a step are launched ahead of the device: enough to keep it busy, but few, because a
cancelled step ends only after them. Never: launching.
"""

from __future__ import annotations

from collections import deque

from proa.engine.executors.device_queue import Mark

AHEAD_S = 0.03  # of work is launched ahead; the host polls every POLL_S, and launches a decode step in a few ms
FIRST_UNITS, MOST_UNITS = 2, 16  # while a unit's time is unknown; at most: a layer for one chunk is some 25 launches
AT_ONCE = 4  # most units launched in one go, for 1 ms each: a decode step that ends meanwhile waits for the host
WINDOW = 16  # units in the mean time of a unit: some of them wait for copies and the next ones do not


class PartsAhead:
    def __init__(self) -> None:
        self._pending: deque[tuple[Mark, Mark]] = deque()  # begin and end of each unit
        self._seconds = deque[float](maxlen=WINDOW)

    def launched(self, begin: Mark, end: Mark) -> None:
        """Note a unit that was launched between these timed marks."""
        self._pending.append((begin, end))

    @property
    def pending(self) -> int:
        """Units that the device has not finished."""
        while self._pending and self._pending[0][1].passed:
            begin, end = self._pending.popleft()
            self._seconds.append(end.seconds_since(begin))
        return len(self._pending)

    @property
    def room(self) -> int:
        """Number of units that should be launched now; then it should be asked again, soon."""
        pending = self.pending
        return min(AT_ONCE, max(0, self._most - pending))

    @property
    def _most(self) -> int:
        seconds = sum(self._seconds)
        if not seconds:
            return FIRST_UNITS
        return max(FIRST_UNITS, min(MOST_UNITS, int(AHEAD_S * len(self._seconds) / seconds)))

    def forget(self) -> None:
        """Start anew for another step, whose units take other times. All units have ended, or are not waited for."""
        self._pending.clear()
        self._seconds.clear()
