"""Copies of what a path computes inside a step, taken by wrappers around the parts of its model. Never: comparing.

The wrappers change no op and no buffer of the model: they add copies, recorded in a native program, captured in a CUDA
graph or made at once. Each place is a name such as "norm1.3.x"; the constants below say what it holds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from proa.engine.executors.parts import BlockByBlock
from proa.hybrid.runtime import HybridUnderway
from proa.layers.decoder import Block, Decoder
from proa.layers.moe import Moe
from proa.layers.norm import RmsNorm
from proa.layers.step import Step
from proa.ops.recorder import Recorder
from proa.ops.residency import Residency
from proa.ops.table import Chosen, Experts, NextRouter, Norm, Parameters, Underway, Unsummed

IN, NORM1, MIXED, MID, NORM2, IDS, WEIGHTS = "in", "norm1", "mixed", "mid", "norm2", "ids", "weights"
NUMBERS = "numbers"
END, FINAL = "end", "final"  # hidden states after the last block, and their norm: rows of the head, not of the step


def place(what: str, block: int) -> str:
    """IN: the residual stream [T, hidden] before a block. NORM1: the mixer's input. MIXED: its output. MID: the
    residual stream after it. NORM2: the FFN's input. IDS, WEIGHTS: of the chosen experts, [T, top_k].
    NUMBERS: theirs on the CPU, -1 if a GPU computes the pair; only on paths that read experts in place."""
    return f"{what}.{block}"


class Notes(Protocol):
    """Where copies go. A step in parts has its own, since whole steps are computed between its parts."""

    def note(self, name: str, rows: Tensor) -> None:
        """Copy rows [T, ...] of the step that is computed, or recorded; of one in parts, rows of its chunk."""

    def in_parts(self, parts: BlockByBlock, rows: int) -> AbstractContextManager[None]:
        """Context in which copies are of a step in parts, which has so many rows."""

    def read(self, name: str, count: int, parts: BlockByBlock | None = None) -> Tensor:
        """The first `count` rows that were copied last, in RAM. parts: of this step in parts."""

    def forget(self, parts: BlockByBlock) -> None:
        """Free the copies of a step in parts."""


class TensorNotes:
    """Copies when called, also as a part of a CUDA graph. rows: of the largest whole step."""

    def __init__(self, rows: int) -> None:
        self._rows, self._whole = rows, dict[str, Tensor]()
        self._of_parts: dict[BlockByBlock, dict[str, Tensor]] = {}
        self._now: tuple[BlockByBlock, int] | None = None  # the step in parts, and its rows, that is computed

    def note(self, name: str, rows: Tensor) -> None:
        kept, room, first = self._whole, self._rows, 0
        if self._now is not None:
            parts, room = self._now
            kept, first = self._of_parts.setdefault(parts, {}), parts.first_row
        if name not in kept:
            kept[name] = rows.new_zeros(room, *rows.shape[1:])
        kept[name][first : first + len(rows)].copy_(rows)

    @contextmanager
    def in_parts(self, parts: BlockByBlock, rows: int) -> Iterator[None]:
        self._now = parts, rows
        try:
            yield
        finally:
            self._now = None

    def read(self, name: str, count: int, parts: BlockByBlock | None = None) -> Tensor:
        kept = self._whole if parts is None else self._of_parts[parts]
        return kept[name][:count].to("cpu", copy=True)

    def forget(self, parts: BlockByBlock) -> None:
        del self._of_parts[parts]


class RecordedNotes:
    """Appends a copy to the program of native ops, which computes whole steps here."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._kept = recorder, dict[str, Tensor]()

    def note(self, name: str, rows: Tensor) -> None:
        recorder = self._recorder
        self._kept[name] = recorder.keep(torch.zeros(rows.shape, dtype=rows.dtype))
        recorder.take(rows, recorder.keep(torch.arange(len(rows))), self._kept[name])

    def in_parts(self, parts: BlockByBlock, rows: int) -> AbstractContextManager[None]:
        raise ValueError("copies of a recorded program are of whole steps")

    def read(self, name: str, count: int, parts: BlockByBlock | None = None) -> Tensor:
        return self._kept[name][:count].clone()

    def forget(self, parts: BlockByBlock) -> None:
        raise ValueError("copies of a recorded program are of whole steps")


def watch(model: Decoder, notes: Notes, *, located: bool = False) -> None:
    """Wrap the parts of a model that was made and not yet recorded or run. located: note NUMBERS too."""
    for number, block in enumerate(model.blocks):
        _watch_block(block, notes, number, located=located)
    model.norm = _WatchedNorm(model.norm, notes, END, FINAL)


def _watch_block(block: Block, notes: Notes, number: int, *, located: bool) -> None:
    if block.mixer is not None:
        block.norm1 = _WatchedNorm(block.norm1, notes, place(IN, number), place(NORM1, number))
        block.mixer = _WatchedMixer(block.mixer, notes, place(MIXED, number))
    if isinstance(block.ffn, Moe):
        block.ffn.experts = _WatchedExperts(block.ffn.experts, notes, number, located=located)
        block.ffn = _WatchedMoe(block.ffn, notes, place(MID, number))
    elif block.ffn is not None:
        block.norm2 = _WatchedNorm(block.norm2, notes, place(MID, number), place(NORM2, number))


class _WatchedNorm(RmsNorm):
    """Notes the residual stream that a norm reads, and the result."""

    def __init__(self, of: RmsNorm, notes: Notes, before: str, after: str) -> None:
        self._of, self._notes, self._before, self._after = of, notes, before, after
        self.norm = of.norm

    def __call__(self, x: Tensor) -> Tensor:
        self._notes.note(self._before, x)
        return self._noted(self._of(x))

    def of_sum(self, x: Tensor, y: Tensor | Unsummed | None) -> tuple[Tensor, Tensor]:
        x, normed = self._of.of_sum(x, y)
        self._notes.note(self._before, x)
        return x, self._noted(normed)

    def _noted(self, normed: Tensor) -> Tensor:
        self._notes.note(self._after, normed)
        return normed


class _WatchedMixer:
    def __init__(self, of: Any, notes: Notes, after: str) -> None:
        self._of, self._notes, self._after = of, notes, after

    def __call__(self, x: Tensor, step: Step, caches: Any) -> Tensor:
        y: Tensor = self._of(x, step, caches)
        self._notes.note(self._after, y)
        return y

    def parameters(self) -> Parameters:
        parameters: Parameters = self._of.parameters()
        return parameters


class _WatchedMoe(Moe):
    """Notes the residual stream before the experts: their input and choice are noted by _WatchedExperts."""

    def __init__(self, of: Moe, notes: Notes, before: str) -> None:
        self._of, self._notes, self._before = of, notes, before

    def parts(
        self, x: Tensor, y: Tensor | Unsummed | None, norm: RmsNorm, slots: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor | Unsummed]]:
        x, sums = yield from self._of.parts(x, y, norm, slots)
        self._notes.note(self._before, x)
        return x, sums

    def foresee(self, x: Tensor, norm: Norm, slots: Tensor) -> None:
        self._of.foresee(x, norm, slots)

    def parameters(self) -> Parameters:
        return self._of.parameters()


class _WatchedExperts:
    def __init__(self, of: Experts, notes: Notes, block: int, *, located: bool) -> None:
        self._of, self._notes, self._block, self._located = of, notes, block, located

    @property
    def residency(self) -> Residency | None:
        return self._of.residency

    def start(self, x: Tensor, chosen: Chosen) -> Underway:
        for what, rows in ((NORM2, x), (IDS, chosen.ids), (WEIGHTS, chosen.weights)):
            self._notes.note(place(what, self._block), rows)
        underway = self._of.start(x, chosen)
        if self._located and isinstance(underway, HybridUnderway):
            self._notes.note(place(NUMBERS, self._block), underway.at.cpu)
        return underway

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        self._of.foresee(x, slots, following)

    def parameters(self) -> Parameters:
        return self._of.parameters()
