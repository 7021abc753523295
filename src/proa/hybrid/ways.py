"""The choice among the ways to ring the doorbell: the requested one, or the first that works here. Belongs here: their
names, their order, messages about those that failed. Never: how they work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proa.errors import NativeError
from proa.hybrid.transport import Transport
from proa.native.doorbell import Way
from proa.types import Decision

WAYS = {"kernel": Way.NUMBER, "memops": Way.FLAGS, "callback": Way.CALLS}  # values of --doorbell, fastest first
_WORDS = {
    "kernel": "kernels write and poll pinned memory",
    "memops": "copies and stream memory operations",
    "callback": "copies and calls by the driver",
}
_TAKE_ANOTHER = "`--doorbell auto` takes another way, if one works."
REMEDY = (
    "Either GPU and CPU do not see each other's writes in pinned memory (a remote or virtual GPU, a broken IOMMU), or "
    "the CPUs are so busy that the doorbell's thread does not run: see `proa doctor`, and stop other programs."
)


@dataclass(frozen=True)
class Taken:
    transport: Transport
    round_trip_us: float  # of an empty job
    decision: Decision

    def rows(self, *, read_ahead: bool) -> tuple[Decision, ...]:
        """The start-up rows of --doorbell and, with read_ahead, of --read-ahead auto, which is on only if kernels
        ring."""
        if not read_ahead:
            return (self.decision,)
        on = self.decision.got == "kernel"
        why = "idle CPU workers prefetch the next layer's probable experts, in steps of up to 4 tokens"
        why = why if on else "prefetch hints by copies cost more than they save"
        return self.decision, Decision("read ahead", "auto", "on" if on else "off", why)


def take(asked: str, make: Callable[[Way], Transport], rounds: int) -> Taken:
    """Try the ways in order. asked: auto, or a name of WAYS. `make` makes each way's transport; `rounds` empty jobs
    probe it.

    Raises NativeError if no way that may be taken works.
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
