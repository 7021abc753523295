"""The interface to the CPU work that accompanies a step on a device: workers answer its jobs. Never: transports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from proa.engine.executors.device_queue import Cut
from proa.hybrid.faults import Fault
from proa.native.doorbell import NOTHING_COUNTED, Counters


class Session(Protocol):
    """An executor calls begin and end once for each launch of a step or of a part of one."""

    def begin(self) -> None:
        """Call before launching a step on the current stream. Several steps may be in flight: each needs its own `end`,
        in the order of launches."""

    def launched(self) -> None:
        """Call after the launch: the session may use the time while the device computes."""

    def end(self) -> None:
        """Call when the device has finished the oldest step. Raises NumericsError, once, for sums that are not finite,
        and any other error of the CPU's work for the step."""

    def faults(self, rows: int) -> Sequence[Fault]:
        """The first fault (NaN or infinity) of each of the first `rows` rows that has one, in the steps since the last
        call."""

    def in_parts(self, first_row: int = 0) -> AbstractContextManager[None]:
        """Context in which launches and `faults` are those of a step in parts, with other steps between its parts.
        Launches are of its rows from first_row on."""

    def decoding(self) -> AbstractContextManager[None]:
        """Context in which launches, or launches that are captured, are those of whole decode steps."""

    @property
    def has_experts(self) -> bool:
        """Whether some of the model's experts lie in RAM."""

    @property
    def variant(self) -> int:
        """Changes with what a step launches: a graph captured under another variant must not be replayed."""

    def begin_pass(self, tokens: int, chunks: int, beside: float | None = None) -> None:
        """Begin a step in parts of `tokens` tokens: each MoE layer is launched in `chunks` chunks, in the order of the
        layers. At most one at a time.

        beside: the share of the time that the step would get in turns with other steps, 0.0 if none are expected; the
        device may then compute it alone, beside them. None: it cannot run beside them, because of its size."""

    @property
    def pass_is_alone(self) -> bool:
        """Whether the device computes the step in parts without the CPU: its launches need no begin, launched and end,
        and may run at the same time as those of other steps. One begin and end must follow all of them."""

    @property
    def pass_is_regular(self) -> bool:
        """Whether the step in parts has the launches of every other regular one of as many rows, so that they may be
        captured. It is so until the end of the step."""

    def cutting(self, cut: Cut) -> AbstractContextManager[None]:
        """Context in which launches of a regular pass are captured. What the session does on the host between two of
        them is given to `cut` instead: it must be called there at each replay."""

    @property
    def pass_waits(self) -> bool:
        """Whether the CPU computes experts of the step in parts, and the device has not taken their sum."""

    def pause_pass(self) -> None:
        """Take that sum, so that other steps may give the CPU jobs. Call it before they are launched, and before the
        last launch is ended: no job may be left without an armed launch."""

    def end_pass(self) -> float:
        """End the step in parts: all parts were launched, or it was cancelled and its launches have ended. Returns the
        fraction of the experts in RAM that were copied to the device for it; the CPU computed the others."""

    def counters(self) -> Counters:
        """Counters of the CPU's work for the device so far."""


class NoSession:
    """Session of a device that computes everything itself."""

    has_experts = False
    pass_is_alone, pass_is_regular, pass_waits = False, True, False
    variant = 0

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

    def in_parts(self, first_row: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    def decoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_pass(self, tokens: int, chunks: int, beside: float | None = None) -> None:
        pass

    def cutting(self, cut: Cut) -> AbstractContextManager[None]:
        return nullcontext()

    def pause_pass(self) -> None:
        pass

    def end_pass(self) -> float:
        return 0.0
