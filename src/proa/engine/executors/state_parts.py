"""Copies the recurrent states of a slot between the caches and host memory, in parts as long as a run of pages. Never:
which slots, files, requests.

Called from threads other than the engine's. On a GPU each copies on a stream of its own, one copy for each tensor (2
MiB of the delta rule's state for Qwen3-Next): states that are read were written by steps that the host has waited for,
and states that are written are used only by steps launched afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from proa.ops.caches import Caches


def states_layout(caches: Caches) -> list[list[object]]:
    """Type and shape of the states of a slot, in their order: what a copy's bytes mean."""
    return [[str(state.dtype), *state.shape[1:]] for state in _states(caches)]


class StateParts:
    """Copies between a slot of all layers' states and buffers of `part_bytes`: the tensors one after another, cut into
    parts, the last one padded with zeros. One object per thread."""

    def __init__(self, caches: Caches, part_bytes: int) -> None:
        self._rows = [state.flatten(1).view(torch.uint8) for state in _states(caches)]  # [slots, bytes] each
        self._starts = list(accumulate((rows.shape[1] for rows in self._rows), initial=0))
        self._part_bytes = part_bytes
        device = self._rows[0].device if self._rows else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        """Number of parts; 0 without states."""
        return -(-self._starts[-1] // self._part_bytes)

    @torch.inference_mode()
    def read(self, slot: int, part: int, into: Tensor) -> None:
        """Copy a part to `into`, uint8 [part_bytes]; returns when it is there."""
        used = 0
        with torch.cuda.stream(self._stream):
            for at, rows in self._cut(slot, part):
                into[at : at + len(rows)].copy_(rows, non_blocking=True)
                used = at + len(rows)
        self._finish()
        into[used:].zero_()

    @torch.inference_mode()
    def write(self, source: Tensor, slot: int, part: int) -> None:
        """Copy a part from `source`, uint8 [part_bytes]; returns when it is there."""
        with torch.cuda.stream(self._stream):
            for at, rows in self._cut(slot, part):
                rows.copy_(source[at : at + len(rows)], non_blocking=True)
        self._finish()

    def _cut(self, slot: int, part: int) -> Iterator[tuple[int, Tensor]]:
        """The bytes of each tensor in a part, and where they begin in it."""
        first = part * self._part_bytes
        for rows, start in zip(self._rows, self._starts, strict=False):
            low, high = max(start, first), min(start + rows.shape[1], first + self._part_bytes)
            if low < high:
                yield low - first, rows[slot, low - start : high - start]

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _states(caches: Caches) -> list[Tensor]:
    return [state for layer in caches for cache in layer for state in cache.states]
