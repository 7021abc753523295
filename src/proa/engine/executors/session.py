"""What must hold while a device computes a step: for models that CPU workers share, that they listen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from proa.hybrid.faults import Fault
from proa.native.doorbell import NOTHING_COUNTED, Counters


class Session(Protocol):
    def begin(self) -> None:
        """A step is about to be launched on the current stream. Others may be under way: each has an `end` of its own,
        and they end in order."""

    def launched(self) -> None:
        """It has been launched: the device may be at it for a while."""

    def end(self) -> None:
        """The device has finished it. Raises NumericsError, once, for sums that are not finite, and whatever else went
        wrong in it."""

    def faults(self, rows: int) -> Sequence[Fault]:
        """Of `rows` rows of the steps since the last call, those that were not finite: one of each, the first first."""

    def in_parts(self) -> AbstractContextManager[None]:
        """What is launched meanwhile, and `faults`, are of a step that is computed in parts, with others between."""

    def counters(self) -> Counters:
        """What the CPU did for the device so far."""


class NoSession:
    """The device needs nobody."""

    def begin(self) -> None:
        pass

    def launched(self) -> None:
        pass

    def end(self) -> None:
        pass

    def counters(self) -> Counters:
        return NOTHING_COUNTED

    def faults(self, rows: int) -> Sequence[Fault]:
        return ()

    def in_parts(self) -> AbstractContextManager[None]:
        return nullcontext()
