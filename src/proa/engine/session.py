"""What must hold while a device computes a step: for models that CPU workers share, that they listen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proa.hybrid.faults import Fault


class Session(Protocol):
    def begin(self) -> None:
        """A step is about to be launched."""

    def end(self) -> None:
        """The device has finished it. Raises NumericsError, once, for sums that are not finite, and whatever else went
        wrong in it."""

    def faults(self, rows: int) -> Sequence[Fault]:
        """Of `rows` rows of the steps since the last call, those that were not finite: one of each, the first first."""


class NoSession:
    """The device needs nobody."""

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def faults(self, rows: int) -> Sequence[Fault]:
        return ()
