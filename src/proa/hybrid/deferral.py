"""Expert deferral: whether the steps launched now are decode steps, of which the CPU may compute the lightest pairs one
MoE layer late. Never: which pairs (csrc/src/deferral.cc), deciding whether to defer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proa.native.doorbell import DECODE_JOB


class Deferral:
    """One per model; its layers ask it at each launch, or once when a launch is captured in a graph."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Within the context, launches are those of whole decode steps."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def job(self, layer: int) -> int:
        """The layer of a job, as the doorbell gets it."""
        return layer + DECODE_JOB if self.active else layer
