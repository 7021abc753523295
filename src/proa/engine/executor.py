"""Runs a step's rows through a model: eagerly, op by op, or as a recorded program. Belongs here: getting a step's
facts to where the model looks for them. Never: requests, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from proa.engine.crew import Crew
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin, is_dynamic
from proa.layers.step import Step
from proa.models.spec import Model, Rope
from proa.ops.cpu import Recorder
from proa.ops.table import AttentionBatch, KvPages, batch_of

# Steps up to this many tokens are bound by reading weights, longer ones by arithmetic: each has its thread count.
FEW_TOKENS = 8
# Angles of all positions are kept up to this context (16 MiB for 64 pairs), beyond it each step computes its own.
KEPT_POSITIONS = 1 << 15


@dataclass(frozen=True)
class Span:
    """A sequence's part of a step: `tokens` at positions from `start` on; `pages` hold all of it."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_prompt: int


class Executor(Protocol):
    spec: Model

    def forward(self, sequences: Sequence[Span]) -> Tensor:
        """Hidden states after the last block of all rows [T, hidden], valid until the next call. Writes K and V."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden states [R, hidden] -> float32 [R, vocab], valid until the next call."""


class EagerExecutor:
    """Calls the model; whatever its ops are, they compute when called."""

    def __init__(self, model: Decoder, caches: tuple[KvPages, ...], page_tokens: int) -> None:
        self.spec = model.spec
        self._model, self._caches, self._page_tokens = model, caches, page_tokens
        self._ropes = {block.mixer.rope for block in model.spec.blocks}
        self.decode_threads = self.prefill_threads = torch.get_num_threads()

    def forward(self, sequences: Sequence[Span]) -> Tensor:
        tokens = torch.tensor([t for s in sequences for t in s.tokens])
        torch.set_num_threads(self.decode_threads if len(tokens) <= FEW_TOKENS else self.prefill_threads)
        kv_lens = [s.start + len(s.tokens) for s in sequences]
        batch = batch_of([len(s.tokens) for s in sequences], kv_lens, [s.pages for s in sequences], self._page_tokens)
        positions, lengths = positions_of(sequences)
        angles = {rope: cos_sin(rope, positions, lengths) for rope in self._ropes}
        return self._model(tokens, Step(batch, angles, self._caches))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def positions_of(sequences: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Of all rows, int64 [T]: the position, and the length that dynamic angles are made for."""
    positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in sequences])
    prompts = torch.cat([torch.full((len(s.tokens),), s.num_prompt) for s in sequences])
    return positions, torch.maximum(prompts, positions + 1)


@dataclass(frozen=True)
class StepLimits:
    """What a recorded program is made for."""

    rows: int
    sequences: int
    context_tokens: int
    page_tokens: int
    head_rows: int


class RecordedExecutor:
    """Records the model's ops once, over buffers for the largest step, and replays them."""

    def __init__(
        self, model: Decoder, recorder: Recorder, caches: tuple[KvPages, ...], limits: StepLimits,
        crew: Crew | None = None,
    ) -> None:  # fmt: skip
        self.spec = model.spec
        self.crew = crew
        self._keep = model, recorder, caches  # the program has the addresses of what they own
        self._program, self._limits, self._cache_pages = recorder.program, limits, len(caches[0].keys)
        self._most_pages = -(-limits.context_tokens // limits.page_tokens)
        rows = limits.rows
        tokens, slots = (recorder.keep(torch.zeros(rows, dtype=torch.int64)) for _ in range(2))
        self._tokens, self._slots = tokens.numpy(), slots.numpy()
        self._page_table = np.zeros((limits.sequences, self._most_pages), np.int32)
        self._q_lens, self._kv_lens = (np.zeros(limits.sequences, np.int32) for _ in range(2))
        self._addresses = (self._q_lens.ctypes.data, self._kv_lens.ctypes.data, self._page_table.ctypes.data)
        self._pages: list[list[int]] = [[] for _ in range(limits.sequences)]  # what stands in the table
        self._angles = {
            rope: _Angles(rope, rows, limits.context_tokens, recorder)
            for rope in {block.mixer.rope for block in model.spec.blocks}
        }
        step = Step(AttentionBatch((), (), (), slots), {rope: a.now for rope, a in self._angles.items()}, caches)
        with torch.inference_mode():
            self._hidden = model(tokens, step)
            self._body = len(self._program)
            recorder.end_blocks(limits.head_rows)
            self._head_input = recorder.new(model.spec.hidden)
            self._logits = model.logits(self._head_input)
        self._end = len(self._program)

    def forward(self, sequences: Sequence[Span]) -> Tensor:
        page_tokens = self._limits.page_tokens
        tokens: list[int] = []
        positions, slots = [], []
        for i, s in enumerate(sequences):
            self._set_pages(i, s.pages)
            self._q_lens[i] = len(s.tokens)
            self._kv_lens[i] = s.start + len(s.tokens)
            tokens += s.tokens
            for position in range(s.start, s.start + len(s.tokens)):
                positions.append(position)
                slots.append(s.pages[position // page_tokens] * page_tokens + position % page_tokens)
        rows = len(tokens)
        self._tokens[:rows] = tokens
        self._slots[:rows] = slots
        for angles in self._angles.values():
            angles.fill(positions, sequences)
        if self.crew:
            self.crew.call(few=rows <= FEW_TOKENS)
        self._program.set_batch(len(sequences), *self._addresses, self._most_pages, self._cache_pages, page_tokens)
        self._program.run(0, self._body, rows)
        return self._hidden[:rows]

    def try_step(self, token: int, share: float) -> None:
        """Compute the first `share` of a step of one token, for its time alone. Writes to the first page."""
        self._tokens[0], self._slots[0] = token, 0
        self._set_pages(0, [0])
        self._q_lens[0] = self._kv_lens[0] = 1
        self._program.set_batch(1, *self._addresses, self._most_pages, self._cache_pages, self._limits.page_tokens)
        self._program.run(0, max(1, round(self._body * share)), 1)

    def _set_pages(self, i: int, pages: Sequence[int]) -> None:
        """A sequence mostly has the pages it had, or one more."""
        before = self._pages[i]
        if before == pages:
            return
        kept = len(before) if before == pages[: len(before)] else 0
        self._page_table[i, kept : len(pages)] = pages[kept:]
        self._pages[i] = list(pages)

    def logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        self._head_input[:rows] = hidden
        self._program.run(self._body, self._end, rows)
        return self._logits[:rows]


class _Angles:
    """cos and sin of one rotary: of the step's rows, and of all positions where those are fixed and few."""

    def __init__(self, rope: Rope, rows: int, context_tokens: int, recorder: Recorder) -> None:
        self._rope = rope
        fixed = not is_dynamic(rope) and context_tokens <= KEPT_POSITIONS
        every = torch.arange(context_tokens)
        self._table = [t.numpy() for t in cos_sin(rope, every, every + 1)] if fixed else []
        shape = (rows, rope.dim // 2)
        self.now = (recorder.keep(torch.zeros(shape)), recorder.keep(torch.zeros(shape)))
        self._places = [now.numpy() for now in self.now]

    def fill(self, positions: list[int], sequences: Sequence[Span]) -> None:
        rows = len(positions)
        for table, place in zip(self._table, self._places, strict=False):
            np.take(table, positions, 0, place[:rows], "clip")  # "clip" spares a copy; positions are within
        if not self._table:
            for now, value in zip(self.now, cos_sin(self._rope, *positions_of(sequences)), strict=True):
                now[:rows] = value
