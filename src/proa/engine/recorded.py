"""Runs a step's rows through a model's native ops, which were recorded once. Belongs here: getting a step's facts to
where the program looks for them. Never: requests, how tokens are drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.clock import Stage, StepClock
from proa.engine.crew import Crew
from proa.engine.executor import FEW_TOKENS, ChoosesOnTheCpu
from proa.engine.page_table import PageTable
from proa.engine.parts import begun
from proa.engine.row_numbers import RowNumbers, ints
from proa.engine.spans import Span, StepLimits, positions_of
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.spec import Rope
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.native.program import Regime
from proa.ops.cpu import Recorder
from proa.ops.table import AttentionBatch, KvPages, LatentPages, LayerCache

# Angles of all positions are kept up to this context (16 MiB for 64 pairs), beyond it each step computes its own.
KEPT_POSITIONS = 1 << 15


class _Parts:
    """A step between whose parts others use the same buffers: no more than their first rows."""

    def __init__(self, sequences: Sequence[Span]) -> None:
        self.sequences, self.done = sequences, 0  # blocks
        self._saved: list[Tensor] = []

    @torch.inference_mode()
    def save(self, live: Sequence[Tensor], rows: int) -> None:
        """Before steps of up to so many rows."""
        if self.done and not self._saved:
            self._saved = [buffer[:rows].clone() for buffer in live]

    @torch.inference_mode()
    def bring_back(self, live: Sequence[Tensor]) -> None:
        """Behind them, if there were any."""
        for buffer, saved in zip(live, self._saved, strict=False):
            buffer[: len(saved)] = saved
        self._saved = []


class RecordedExecutor(ChoosesOnTheCpu):
    """Records the model's ops once, over buffers for the largest step, and replays them. No step calls torch."""

    def __init__(
        self, model: Decoder, recorder: Recorder, caches: tuple[LayerCache, ...], limits: StepLimits,
        crew: Crew | None = None, *, deterministic: bool = False,
    ) -> None:  # fmt: skip
        """deterministic: a row's bits depend on its phase alone; a step's rows are of one phase then."""
        super().__init__()
        self._deterministic = deterministic
        self.spec, self.clock = model.spec, StepClock()
        self.crew = crew
        # The program has the addresses of what they own, and of what caches do.
        self._keep: list[object] = [model, recorder]
        self._caches = caches
        self._program, self._limits = recorder.program, limits
        tokens, slots, positions = (_numbers(recorder, limits.rows) for _ in range(3))
        self._rows = RowNumbers(tokens, slots, positions)
        most_pages = -(-limits.context_tokens // limits.page_tokens)
        lens = torch.zeros(3, limits.sequences, dtype=torch.int32)
        table = torch.zeros(limits.sequences, most_pages, dtype=torch.int32)
        self._q_lens, self._kv_lens, self._states = map(ints, lens)
        self._pages = PageTable(table)
        self._keep += lens, table
        addresses = [of.data_ptr() for of in (*lens, table)]
        self._shape = (*addresses, most_pages, _num_pages(caches), limits.page_tokens)
        angles = {rope: _angles(rope, positions, limits.context_tokens, recorder) for rope in model.spec.ropes}
        self._changing = {rope: places for rope, places in angles.items() if not _is_kept(rope, limits.context_tokens)}
        step = Step(AttentionBatch((), (), (), slots), angles, caches)
        with torch.inference_mode():
            blocks = [(hidden, len(self._program)) for hidden in model.by_blocks(tokens, step)]
            hidden, self._body = blocks[-1]
            self._ends = [end for _, end in blocks]
            # All that a block goes on with, but for KV and states.
            self._live = [hidden, *(place for places in angles.values() for place in places)]
            recorder.end_blocks(limits.head_rows)
            scored = _numbers(recorder, limits.head_rows)
            self._logits = model.logits(recorder.take(hidden, scored))
            self._best = ints(model.argmax(self._logits))
        self._scored = ints(scored)
        self._scored_rows: Sequence[int] = ()
        self._scored_logits = self._logits[:0]
        self._end = len(self._program)
        self._parts: _Parts | None = None  # of a step that is computed between others
        self._began = self._step_s = self._block_s = 0.0

    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        self._began = time.perf_counter()
        if self._parts is not None:
            self._parts.save(self._live, self._limits.sequences)
        rows = self._set(sequences)
        if self._changing:
            self._compute_angles(sequences, rows)
        if self.crew:
            self.crew.call(few=rows <= FEW_TOKENS)
        self._set_scored(scored)
        self.clock.lap(Stage.INPUTS)
        if len(scored) == rows:  # a step of decode: one call
            self._program.run(0, self._end, rows)
        else:
            self._program.run(0, self._body, rows)
            self._run_head()
        self.clock.lap(Stage.PROGRAM)

    def _set(self, sequences: Sequence[Span]) -> int:
        """Put a step in; how many rows it has."""
        for i, s in enumerate(sequences):
            self._pages.set(i, s.pages)
            self._q_lens[i], self._kv_lens[i], self._states[i] = len(s.tokens), s.start + len(s.tokens), s.state
        if self._deterministic:
            self._program.set_regime(Regime.PROMPT if sequences[0].in_prompt else Regime.DECODE)
        self._program.set_batch(len(sequences), *self._shape)
        return self._rows.fill(sequences, self._limits.page_tokens)

    def begin(self, sequences: Sequence[Span]) -> None:
        """Steps between its parts have one row a sequence."""
        self._parts = _Parts(sequences)

    def advance(self, blocks: int) -> bool:
        began, parts = time.perf_counter(), begun(self._parts)
        rows = self._set(parts.sequences)
        if self._changing and parts.done == 0:
            self._compute_angles(parts.sequences, rows)
        parts.bring_back(self._live)
        if self.crew:
            self.crew.call(few=rows <= FEW_TOKENS)
        self.clock.lap(Stage.INPUTS)
        last = min(parts.done + blocks, len(self._ends))
        self._program.run(self._ends[parts.done - 1] if parts.done else 0, self._ends[last - 1], rows)
        self._block_s = (time.perf_counter() - began) / max(1, last - parts.done)
        parts.done = last
        self.clock.lap(Stage.PROGRAM)
        return last == len(self._ends)

    def end(self) -> None:
        parts, self._parts = begun(self._parts), None
        parts.bring_back(self._live)
        self._scored_rows = ()
        if self._deterministic:
            self._program.set_regime(Regime.PROMPT)  # for the head: steps between its parts were decode

    def drop(self) -> None:
        self._parts = None

    def turns_s(self) -> tuple[float, float]:
        return self._step_s, self._block_s

    @torch.inference_mode()
    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        copy_states(self._caches, slots)
        self.clock.lap(Stage.PROGRAM)

    def try_step(self, token: int, share: float) -> None:
        """Compute the first `share` of a step of one token, for its time alone. Writes to the first page."""
        rows = self._set([Span((token,), 0, [0], 1)])
        self._program.run(0, max(1, round(self._body * share)), rows)

    def _compute_angles(self, sequences: Sequence[Span], rows: int) -> None:
        for rope, places in self._changing.items():
            for place, value in zip(places, cos_sin(rope, *positions_of(sequences)), strict=True):
                place[:rows] = value

    def score(self, rows: Sequence[int]) -> list[int]:
        if rows != self._scored_rows:
            self._set_scored(rows)
            self.clock.lap(Stage.INPUTS)
            self._run_head()
            self.clock.lap(Stage.PROGRAM)
        self._step_s = time.perf_counter() - self._began
        return self._best[: len(rows)].tolist()

    def _set_scored(self, rows: Sequence[int]) -> None:
        if len(rows) != len(self._scored_rows):
            self._scored_logits = self._logits[: len(rows)]
        self._scored_rows = rows
        for i, row in enumerate(rows):
            self._scored[i] = row

    def _run_head(self) -> None:
        if self._scored_rows:
            self._program.run(self._body, self._end, len(self._scored_rows))

    def broken(self) -> dict[int, str]:
        return {}

    @property
    def logits(self) -> Tensor:
        return self._scored_logits

    def counters(self) -> Counters:
        return NOTHING_COUNTED


def _num_pages(caches: Sequence[LayerCache]) -> int:
    """Of the layers that have pages, all as many; 1 where none has, and the table is read by nobody."""
    for cache in caches:
        if isinstance(cache, KvPages):
            return len(cache.keys)
        if isinstance(cache, LatentPages):
            return len(cache.rows)
    return 1


def _numbers(recorder: Recorder, count: int) -> Tensor:
    """int64 [count] that the program reads."""
    return recorder.keep(torch.zeros(count, dtype=torch.int64))


def _is_kept(rope: Rope, context_tokens: int) -> bool:
    """Whether the angles of all positions are computed at start: they are fixed and few."""
    return not rope.dynamic and context_tokens <= KEPT_POSITIONS


def _angles(rope: Rope, positions: Tensor, context_tokens: int, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """cos and sin of a step's rows: taken by the program from those of all positions, or to be filled in."""
    if _is_kept(rope, context_tokens):
        every = torch.arange(context_tokens)
        cos, sin = cos_sin(rope, every, every + 1)
        return recorder.take(cos, positions), recorder.take(sin, positions)
    shape = (recorder.rows, rope.dim // 2)
    return recorder.keep(torch.zeros(shape)), recorder.keep(torch.zeros(shape))
