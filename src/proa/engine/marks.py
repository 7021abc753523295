"""How long a GPU is at what: marks that it passes. Never: waiting."""

from __future__ import annotations

import torch


class Marks:
    """Of steps and of parts of another step, in turns on one stream. Times are read when the device has passed."""

    def __init__(self) -> None:
        self.step_s = self.block_s = 0.0  # of the last ones that were passed; 0: none yet
        self._begun: torch.cuda.Event | None = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def begin(self, stream: torch.cuda.Stream) -> None:
        self._begun = _mark(stream)

    def end(self, stream: torch.cuda.Stream, blocks: int = 0) -> None:
        """Of what has begun: so many blocks, or a whole step. Nothing has: nothing is marked."""
        if self._begun is not None:
            self._pending.append((self._begun, _mark(stream), blocks))
            self._begun = None

    def read(self) -> None:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            before, behind, blocks = self._pending.pop(0)
            seconds = before.elapsed_time(behind) / 1e3
            if blocks:
                self.block_s = seconds / blocks
            else:
                self.step_s = seconds


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record(stream)
    return mark
