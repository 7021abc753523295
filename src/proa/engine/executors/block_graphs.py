"""Short steps in parts as CUDA graphs, several for each block. Op by op the host takes 3 ms for a layer whose experts
are streamed (24 layers of Qwen3-30B-A3B, a Xeon at 2 GHz), as long as copies and CPU take for 64 tokens in int4.
Belongs here: which steps have graphs, capturing, replaying. Never: what is between two graphs (hybrid/streaming.py).

A step of one chunk is padded to a size. The first one of a size launches its ops one by one, padded, which compiles and
loads what captures need; if it is cancelled, so does the next one. Then each block is captured before it is first
replayed. A block reads the residual stream from memory outside the graphs' pool and writes it back there, so that other
graphs may be replayed between two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.device_queue import Cut, Queue
from proa.engine.executors.device_steps import DeviceSteps
from proa.engine.executors.watch import WatchedSession
from proa.layers.decoder import Decoder
from proa.layers.step import Step
from proa.models.spec import Rope

Replay = Callable[[], None]


class BlockGraphs:
    """The graphs of one executor's blocks. sizes: numbers of rows, rising; empty: no step has graphs."""

    def __init__(
        self, model: Decoder, on: DeviceSteps, session: WatchedSession, queue: Queue, sizes: tuple[int, ...]
    ) -> None:  # fmt: skip
        """queue: of prompts."""
        self._model, self._on, self._session, self._queue, self._sizes = model, on, session, queue, sizes
        most = sizes[-1] if sizes else 0
        self._x = torch.zeros(most, model.spec.hidden, dtype=torch.bfloat16, device=queue.device)
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._launched: set[int] = set()  # sizes whose ops were launched one by one
        self._steps: dict[int, Step] = {}
        self._replays: dict[tuple[int, int], Replay] = {}  # by size and block

    def size(self, rows: int, chunks: int) -> int | None:
        """The size that a step of so many rows and chunks is padded to; None: it has no graphs."""
        return next((size for size in self._sizes if size >= rows and chunks == 1), None)

    def begin(
        self, inputs: DeviceInputs, size: int, rows: int, kept: Mapping[int, Tensor],
        launching: Callable[[int], AbstractContextManager[None]],
    ) -> Replayed | None:  # fmt: skip
        """Begin a step of `rows` rows, whose inputs are on the device. Launches its embeddings and angles. None: its
        ops must be launched one by one, padded. kept, launching: see BlockByBlock."""
        if size not in self._launched:
            return None
        tokens, step = self._on.step(inputs, size)
        self._x[:size].copy_(self._model.embedded(tokens))
        for rope, angles in step.angles.items():
            for to, values in zip(self._places(rope, angles), angles, strict=True):
                to[:size].copy_(values)
        own = {rope: (cos[:size], sin[:size]) for rope, (cos, sin) in self._angles.items()}
        self._steps.setdefault(size, replace(step, angles=own))
        return Replayed(self, size, rows, kept, launching)

    def launched(self, size: int | None) -> None:
        """Note that all blocks of a step were launched, so that the next one of this size may be captured. A step that
        is cancelled may have launched only some. size: None: the step has no graphs."""
        if size is not None:
            self._launched.add(size)

    def _places(self, rope: Rope, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Where graphs read a rope's angles: steps between two blocks overwrite those of dynamic ropes."""
        if rope not in self._angles:
            cos, sin = (values.new_zeros(self._sizes[-1], values.shape[1]) for values in angles)
            self._angles[rope] = cos, sin
        return self._angles[rope]

    @property
    def num_blocks(self) -> int:
        return len(self._model.blocks)

    def residual(self, rows: int) -> Tensor:
        """[rows, hidden]: the residual stream of the step under way, after the block that was replayed last."""
        return self._x[:rows]

    def launch(self, block: int, size: int) -> None:
        """Replay a block."""
        key = size, block
        if key not in self._replays:
            self._replays[key] = self._queue.capture_in_pieces(partial(self._compute, block, size))
        self._replays[key]()

    def _compute(self, block: int, size: int, cut: Cut) -> None:
        with self._session.cutting(cut):
            x = self._x[:size]
            x.copy_(self._model.block(block, x, self._steps[size]))


class Replayed:
    """A step in parts whose blocks are graphs. Implements Parts."""

    def __init__(
        self, graphs: BlockGraphs, size: int, rows: int, kept: Mapping[int, Tensor],
        launching: Callable[[int], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._graphs, self._size, self._rows, self._kept, self._launching = graphs, size, rows, kept, launching
        self._next, self._blocks, self._hidden = 0, graphs.num_blocks, graphs.residual(rows)

    @property
    def done(self) -> bool:
        return self._next == self._blocks

    @property
    def done_share(self) -> float:
        return self._next / self._blocks

    @property
    def hidden(self) -> Sequence[Tensor]:
        """[T, hidden] after the last block, in one piece."""
        return (self._hidden,)

    def advance(self, units: int) -> int:
        count = min(units, self._blocks - self._next)
        for _ in range(count):
            with self._launching(0):
                self._graphs.launch(self._next, self._size)
                hidden = self._graphs.residual(self._rows)
            if self._next in self._kept:
                self._kept[self._next][: self._rows].copy_(hidden)
            self._next += 1
        if count and self.done:
            self._hidden = self._graphs.residual(self._rows).clone()  # the next step overwrites it
        return count
