"""Runs a step's rows through a model: eagerly, op by op, or as a recorded program. Belongs here: getting a step's
facts to where the model looks for them. Never: requests, how tokens are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.clock import Stage, StepClock
from proa.engine.crew import Crew
from proa.engine.page_table import PageTable
from proa.engine.row_numbers import RowNumbers, ints
from proa.engine.session import NoSession, Session
from proa.engine.spans import Span, StepLimits, positions_of
from proa.engine.watch import WatchedSession
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin, is_dynamic
from proa.layers.step import Step
from proa.models.spec import Model, Rope
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.ops.cpu import Recorder
from proa.ops.table import AttentionBatch, KvPages, LatentPages, LayerCache, batch_of
from proa.sampling.choose import Choice, choose
from proa.sampling.logprobs import token_logprobs
from proa.sampling.rows import Row
from proa.types import TokenLogprob

# Steps up to this many tokens are bound by reading weights, longer ones by arithmetic: each has its thread count.
FEW_TOKENS = 8
# Angles of all positions are kept up to this context (16 MiB for 64 pairs), beyond it each step computes its own.
KEPT_POSITIONS = 1 << 15


class Executor(Protocol):
    """`clock` is told when inputs are ready and when the model is done."""

    spec: Model
    clock: StepClock

    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        """Compute all rows of a step; write their K and V. `scored`: the rows that score or sample will name first, if
        they are known: they may be scored along."""

    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        """Behind what was computed and before what will be: of all recurrent layers, the first slot of each pair to the
        second, one pair after the other."""

    def score(self, rows: Sequence[int]) -> list[int]:
        """The best next token after each of these rows of the last step; -1 where logits are not finite."""

    def sample(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        """Choose the next token after each of these rows of the last step, as each is asked for."""

    def choices(self) -> list[Choice]:
        """What `sample` chose."""

    def explain(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of a token after each of these rows of the last step, and of the `top` best ones there."""

    def broken(self) -> dict[int, str]:
        """Sequences of the last step, by their places, that are known not to be finite, and why. Called once a step,
        after what is sampled from it was scored."""

    @property
    def logits(self) -> Tensor:
        """Of the rows scored last, float32 [R, vocab], valid until the next call."""

    def counters(self) -> Counters:
        """What the CPU did for a GPU so far."""


class Follower(Executor, Protocol):
    """Computes steps one after the other without waiting for what the last one's tokens are.

    forward, sample, then any number of times: follow (the step after that one), choices and broken (of the one before),
    sample (of the one that followed); choices at last.
    """

    def can_follow(self) -> bool:
        """Whether `follow` is possible now, the last step having been sampled."""

    def follow(self, sequences: Sequence[Span]) -> None:
        """Compute one more token of each sequence of the last step that `sample` was asked for, in that order: the one
        that is being chosen, which they do not name."""


class ChoosesOnTheCpu(ABC):
    """What executors have in common whose logits are in RAM when `score` returns."""

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    @abstractmethod
    def score(self, rows: Sequence[int]) -> list[int]: ...

    @property
    @abstractmethod
    def logits(self) -> Tensor: ...

    def sample(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        self._choices = choose(self.score(rows), asked, self.logits)

    def choices(self) -> list[Choice]:
        return self._choices

    def explain(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        self.score(rows)
        return token_logprobs(self.logits, tokens, top)


class EagerExecutor(ChoosesOnTheCpu):
    """Calls the model; whatever its ops are, they compute when called."""

    def __init__(
        self, model: Decoder, caches: tuple[LayerCache, ...], page_tokens: int, session: Session | None = None
    ) -> None:
        super().__init__()
        self.spec, self.clock = model.spec, StepClock()
        self._session = WatchedSession(session or NoSession(), model.spec)
        self._sequences: Sequence[Span] = ()
        self._model, self._caches, self._page_tokens = model, caches, page_tokens
        self._ropes = model.spec.ropes
        self._hidden = self._logits = torch.empty(0)
        self.decode_threads = self.prefill_threads = torch.get_num_threads()

    @torch.inference_mode()
    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        tokens = torch.tensor([t for s in sequences for t in s.tokens])
        torch.set_num_threads(self.decode_threads if len(tokens) <= FEW_TOKENS else self.prefill_threads)
        kv_lens = [s.start + len(s.tokens) for s in sequences]
        q_lens, pages = [len(s.tokens) for s in sequences], [s.pages for s in sequences]
        batch = batch_of(q_lens, kv_lens, pages, self._page_tokens, [s.state for s in sequences])
        positions, lengths = positions_of(sequences)
        angles = {rope: cos_sin(rope, positions, lengths) for rope in self._ropes}
        self._sequences = sequences
        self.clock.lap(Stage.INPUTS)
        self._session.begin()
        try:
            self._hidden = self._model(tokens, Step(batch, angles, self._caches))
            self._session.launched()
        finally:
            self._session.end()
        self.clock.lap(Stage.PROGRAM)

    @torch.inference_mode()
    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        copy_states(self._caches, slots)
        self.clock.lap(Stage.PROGRAM)

    @torch.inference_mode()
    def score(self, rows: Sequence[int]) -> list[int]:
        self._logits = self._model.logits(self._hidden[list(rows)])
        best: list[int] = self._model.best(self._logits).tolist()
        self.clock.lap(Stage.PROGRAM)
        return best

    def broken(self) -> dict[int, str]:
        return self._session.broken(self._sequences, look=True)

    @property
    def logits(self) -> Tensor:
        return self._logits

    def counters(self) -> Counters:
        return self._session.counters()


class RecordedExecutor(ChoosesOnTheCpu):
    """Records the model's ops once, over buffers for the largest step, and replays them. No step calls torch."""

    def __init__(
        self, model: Decoder, recorder: Recorder, caches: tuple[LayerCache, ...], limits: StepLimits,
        crew: Crew | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
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
            hidden = model(tokens, step)
            self._body = len(self._program)
            recorder.end_blocks(limits.head_rows)
            scored = _numbers(recorder, limits.head_rows)
            self._logits = model.logits(recorder.take(hidden, scored))
            self._best = ints(model.best(self._logits))
        self._scored = ints(scored)
        self._scored_rows: Sequence[int] = ()
        self._scored_logits = self._logits[:0]
        self._end = len(self._program)

    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
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
        self._program.set_batch(len(sequences), *self._shape)
        return self._rows.fill(sequences, self._limits.page_tokens)

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
    return not is_dynamic(rope) and context_tokens <= KEPT_POSITIONS


def _angles(rope: Rope, positions: Tensor, context_tokens: int, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """cos and sin of a step's rows: taken by the program from those of all positions, or to be filled in."""
    if _is_kept(rope, context_tokens):
        every = torch.arange(context_tokens)
        cos, sin = cos_sin(rope, every, every + 1)
        return recorder.take(cos, positions), recorder.take(sin, positions)
    shape = (recorder.rows, rope.dim // 2)
    return recorder.keep(torch.zeros(shape)), recorder.keep(torch.zeros(shape))
