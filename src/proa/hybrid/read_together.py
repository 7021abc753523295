"""Measurement at start of the rates at which GPU and CPU read experts in RAM together. Never: kernels, shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proa.machine.cost.co_fetch import InPlaceRates
from proa.obs.units import format_rate

BESIDE_S, ALONE_S = 0.2, 0.05  # durations: both read; the GPU reads alone
ATTEMPTS = 3  # each takes twice as long as the one before
LEAST_OVERLAP = 0.5  # share of the GPU's time during which the CPU must have read too
MOST_FASTER = 1.25  # the GPU's rate beside the CPU over its rate alone: beyond this, one of them was measured wrong


@dataclass(frozen=True)
class Reads:
    """Bytes/s of the GPU, and of the CPU beside it; overlap: share of the time during which both read."""

    gpu_bytes_per_s: float
    cpu_bytes_per_s: float = 0.0
    overlap: float = 0.0


class GpuReader(Protocol):
    """Reads experts in RAM, over PCIe."""

    @property
    def nbytes(self) -> int:
        """Bytes per round."""

    def read(self, rounds: int = 1, meanwhile: Callable[[], int] | None = None) -> Reads:
        """Read all experts `rounds` times. meanwhile: called repeatedly until the GPU is done; returns the bytes that
        the CPU has read."""


@dataclass(frozen=True)
class Together:
    """Bytes/s: the GPU alone, the GPU beside the CPU, the CPU beside the GPU."""

    alone: float
    gpu: float
    cpu: float

    @property
    def rates(self) -> InPlaceRates:
        return InPlaceRates(self.alone, self.gpu + self.cpu)

    def __str__(self) -> str:
        return (
            f"the GPU reads experts in RAM at {format_rate(self.alone)} alone, at {format_rate(self.gpu)} beside the "
            f"CPU's {format_rate(self.cpu)}"
        )


def read_together(gpu: GpuReader, cpu: Callable[[], int]) -> Together | None:
    """Measure the rates; None if no attempt was valid: the CPU read nothing, or overlapped the GPU for too little time,
    or the GPU was faster beside the CPU than alone."""
    for attempt in range(ATTEMPTS):
        rounds_per_s = gpu.read().gpu_bytes_per_s / gpu.nbytes * 2**attempt
        alone = gpu.read(max(1, round(ALONE_S * rounds_per_s)))
        both = gpu.read(max(1, round(BESIDE_S * rounds_per_s)), cpu)
        found = Together(alone.gpu_bytes_per_s, both.gpu_bytes_per_s, both.cpu_bytes_per_s)
        if found.cpu > 0 and both.overlap >= LEAST_OVERLAP and found.gpu <= MOST_FASTER * found.alone:
            return found
    return None
