"""Which of the ways to ring the doorbell is taken: the first that works here, unless one was asked for. Belongs here:
their names and order, and what is said of those that failed. Never: how they work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proa.errors import NativeError
from proa.hybrid.transport import Transport
from proa.native.doorbell import Way
from proa.types import Decision

WAYS = {"kernel": Way.NUMBER, "memops": Way.FLAGS, "callback": Way.CALLS}  # --doorbell, the fastest first
_WORDS = {
    "kernel": "kernels write and poll pinned memory",
    "memops": "copies and stream memory operations",
    "callback": "copies and calls by the driver",
}
_TAKE_ANOTHER = "`--doorbell auto` takes another way, if one works."
REMEDY = (
    "Either GPU and CPU do not see each other's writes in pinned memory (a remote or virtual GPU, a broken IOMMU), or "
    "the CPUs are so busy that the doorbell's thread gets no turn: look at `proa doctor` and at what else runs here."
)


@dataclass(frozen=True)
class Taken:
    transport: Transport
    round_trip_us: float  # of a job without work
    decision: Decision

    def read_ahead(self) -> Decision:
        """What becomes of it, where it is wanted."""
        if self.decision.got == "kernel":
            why = "CPU workers that wait read what the next layer will probably need; in steps of up to 4 tokens"
            return Decision("read ahead", "auto", "on", why)
        return Decision("read ahead", "auto", "off", "saying what will be needed by copies takes longer than it saves")


def take(asked: str, make: Callable[[Way], Transport], rounds: int) -> Taken:
    """asked: auto, or a name. Of each way, `make` makes the transport and `rounds` jobs without work try it.

    Raises NativeError, where none works that may be taken.
    """
    failures = []
    for name in WAYS if asked == "auto" else (asked,):
        try:
            transport = make(WAYS[name])
            try:
                round_trip_us = transport.probe_us(rounds)
            except NativeError:
                transport.close()
                raise
        except NativeError as error:
            failures.append(f"{name}: {error.message}")
            continue
        why = "; ".join((f"{_WORDS[name]}; an empty round trip takes {round_trip_us:.1f} us", *failures))
        return Taken(transport, round_trip_us, Decision("doorbell", asked, name, why))
    if asked == "auto":
        raise NativeError("No way to ring the CPU works here. " + " ".join(failures), REMEDY)
    raise NativeError(f"The doorbell does not work by {failures[0]}", _TAKE_ANOTHER)
