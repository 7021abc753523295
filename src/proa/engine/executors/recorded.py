"""Executes steps by replaying native ops that were recorded once. Belongs here: writing a step's inputs into the
program's buffers. Never: requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.executors.batch import Span, StepBatch, StepLimits, StepResult, positions_of
from proa.engine.executors.clock import Stage, StepClock
from proa.engine.executors.crew import Crew
from proa.engine.executors.executor import FEW_TOKENS, Pace, prompt_logprobs, step_result, unfinished
from proa.engine.executors.page_table import PageTable
from proa.engine.executors.row_numbers import RowNumbers, ints
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.spec import Rope
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.native.program import Regime
from proa.ops.caches import Caches
from proa.ops.cpu import Recorder
from proa.ops.table import AttentionBatch
from proa.sampling.choose import SampledToken, choose
from proa.sampling.logprobs import token_logprobs
from proa.sampling.rows import Row
from proa.types import TokenLogprob

# Angles of all positions are kept up to this context (16 MiB for 64 pairs), beyond it each step computes its own.
KEPT_POSITIONS = 1 << 15
BLOCKS = 5  # the time of a block is the median of this many: one disturbed by another program delays no later one


class _Parts:
    """A step in parts. Other steps between its parts overwrite the first rows of the shared activation buffers, so
    these are saved before and restored after such steps."""

    def __init__(self) -> None:
        self.num_blocks = 0  # computed
        self._saved: list[Tensor] = []

    @torch.inference_mode()
    def save(self, live: Sequence[Tensor], rows: int) -> None:
        """Save the first `rows` rows, of which some may be saved already."""
        first = len(self._saved[0]) if self._saved else 0
        if not self.num_blocks or first >= rows:
            return
        more = [buffer[first:rows].clone() for buffer in live]
        self._saved = [torch.cat(both) for both in zip(self._saved, more, strict=True)] if self._saved else more

    @torch.inference_mode()
    def restore(self, live: Sequence[Tensor]) -> None:
        for buffer, saved in zip(live, self._saved, strict=False):
            buffer[: len(saved)] = saved
        self._saved = []


@dataclass(eq=False)
class RecordedStep:
    """A launched step, whose hidden states lie in the program's buffer until the next launch. choices: one for each row
    of the sampled `spans`."""

    batch: StepBatch
    began_s: float
    parts: _Parts | None = None
    spans: Sequence[int] = ()
    choices: list[SampledToken] = field(default_factory=list)


class RecordedExecutor:
    """Records the model's ops once, over buffers for the largest step, and replays them. No step calls torch."""

    def __init__(
        self, model: Decoder, recorder: Recorder, caches: Caches, limits: StepLimits,
        crew: Crew | None = None, *, deterministic: bool = False, kept_blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """deterministic: kernels are chosen by phase alone, so a row's bits do not depend on the step it is in; the
        rows of a step are then of one phase."""
        self._deterministic = deterministic
        self.spec, self.clock = model.spec, StepClock()
        self.crew = crew
        self._keep: list[object] = [model, recorder]  # the program holds addresses of their buffers, and of the caches'
        self.caches = caches
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
        inputs = Step(AttentionBatch((), (), (), slots), angles, caches)
        with torch.inference_mode():
            self._kept: dict[int, Tensor] = {}
            self._ends: list[int] = []  # index in the program after each block's last op
            for block, hidden in enumerate(model.by_blocks(tokens, inputs)):
                if block in kept_blocks:
                    self._kept[block] = recorder.keep(torch.zeros(limits.rows, model.spec.hidden, dtype=hidden.dtype))
                    recorder.take(hidden, recorder.keep(torch.arange(limits.rows)), self._kept[block])
                self._ends.append(len(self._program))
            self._body = self._ends[-1]
            # What a block reads of the blocks before it, apart from caches.
            self._live = [hidden, *(place for places in angles.values() for place in places)]
            recorder.end_blocks(limits.head_rows)
            scored = _numbers(recorder, limits.head_rows)
            self._logits = model.logits(recorder.take(hidden, scored))
            self._best = ints(model.argmax(self._logits))
        self._scored = ints(scored)
        self._scored_rows: Sequence[int] = ()  # rows of the step computed last whose logits are computed
        self._scored_logits = self._logits[:0]
        self._end = len(self._program)
        self._unfinished: list[RecordedStep] = []  # steps in parts; the last one is advanced
        self._step_s = 0.0
        self._block_s = deque[float](maxlen=BLOCKS)  # seconds of the last blocks of the step in parts

    def launch(self, batch: StepBatch, after: RecordedStep | None = None) -> RecordedStep:
        step = RecordedStep(batch, time.perf_counter())
        self._copy(batch.copies_before)
        self._save(self._limits.sequences)
        rows = self._write_inputs(batch)
        if self._changing:
            self._compute_angles(batch.spans, rows)
        if self.crew:
            self.crew.call(few=rows <= FEW_TOKENS)
        scored = batch.rows_of(batch.sampled)
        self._set_scored(scored)
        self.clock.lap(Stage.INPUTS)
        if len(scored) == rows:  # a step of decode: one call
            self._program.run(0, self._end, rows)
        else:
            self._program.run(0, self._body, rows)
            self._run_head()
        self.clock.lap(Stage.PROGRAM)
        self._copy(batch.copies_after)
        return step

    def launch_in_parts(self, batch: StepBatch, share: float = 0.0) -> RecordedStep:
        step = RecordedStep(batch, time.perf_counter(), _Parts())
        self._copy(batch.copies_before)
        self._save(max(self._limits.sequences, batch.num_tokens))
        self._unfinished.append(step)
        self._block_s.clear()
        return step

    def _save(self, rows: int) -> None:
        """Save the first rows of the step in parts that is advanced: another step comes next."""
        if self._unfinished:
            unfinished(self._unfinished[-1].parts).save(self._live, rows)

    def _write_inputs(self, batch: StepBatch) -> int:
        """Returns the number of rows."""
        spans = batch.spans
        for i, s in enumerate(spans):
            self._pages.set(i, s.pages)
            self._q_lens[i], self._kv_lens[i], self._states[i] = len(s.tokens), s.start + len(s.tokens), s.state
        if self._deterministic:
            self._program.set_regime(Regime.PROMPT if spans[0].in_prompt else Regime.DECODE)
        self._program.set_batch(len(spans), *self._shape)
        return self._rows.fill(spans, self._limits.page_tokens)

    def advance(self, step: RecordedStep, blocks: int) -> bool:
        began_s, parts = time.perf_counter(), unfinished(step.parts)
        rows = self._write_inputs(step.batch)
        if self._changing and parts.num_blocks == 0:
            self._compute_angles(step.batch.spans, rows)
        parts.restore(self._live)
        if self.crew:
            self.crew.call(few=rows <= FEW_TOKENS)
        self.clock.lap(Stage.INPUTS)
        first, last = parts.num_blocks, min(parts.num_blocks + blocks, len(self._ends))
        self._program.run(self._ends[first - 1] if first else 0, self._ends[last - 1], rows)
        self._block_s.append((time.perf_counter() - began_s) / max(1, last - first))
        parts.num_blocks = last
        done = last == len(self._ends)
        if done:
            self._copy(step.batch.copies_after)
        self.clock.lap(Stage.PROGRAM)
        return done

    def runs_beside(self, step: RecordedStep) -> bool:
        return False  # both would need all workers

    def keep_ahead(self, step: RecordedStep) -> bool:
        raise ValueError("on a CPU steps are computed one after the other: advance this one")

    def ended(self, step: RecordedStep) -> bool:
        return True

    def done_share(self, step: RecordedStep) -> float:
        return unfinished(step.parts).num_blocks / len(self._ends)

    def sample(self, step: RecordedStep, spans: Sequence[int], rows: Sequence[Row]) -> None:
        if step.parts is not None:
            step.parts.restore(self._live)
            self._remove(step)
            self._scored_rows = ()
            if self._deterministic:
                self._program.set_regime(Regime.PROMPT)  # decode steps between the parts changed it
        step.spans = spans
        if spans:
            logits = self._score(step.batch.rows_of(spans))
            step.choices = choose(self._best[: len(rows)].tolist(), rows, logits)
        if step.parts is None:
            self._step_s = time.perf_counter() - step.began_s
        self.clock.lap(Stage.PROGRAM)

    def wait(self, step: RecordedStep) -> StepResult:
        result = step_result(step.batch, step.spans, step.choices, {})
        result.prompt_logprobs = prompt_logprobs(step.batch, self._logprobs)
        return result

    def _logprobs(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        return token_logprobs(self._score(rows), tokens, top)

    def can_follow(self, step: RecordedStep) -> bool:
        return False  # a launch returns when the step is computed: there is nothing to overlap

    def cancel(self, step: RecordedStep) -> None:
        if step in self._unfinished:
            self._remove(step)

    def _remove(self, step: RecordedStep) -> None:
        """Remove a step in parts. If another one goes on, its blocks are measured anew."""
        self._unfinished.remove(step)
        if self._unfinished:
            self._block_s.clear()

    def pace(self) -> Pace:
        return Pace(self._step_s, median(self._block_s) if self._block_s else 0.0)

    def _copy(self, slots: Sequence[tuple[int, int]]) -> None:
        if slots:
            with torch.inference_mode():
                copy_states(self.caches, slots)
            self.clock.lap(Stage.PROGRAM)

    def try_step(self, token: int, share: float) -> None:
        """Compute the first `share` of a step of one token, to time it. Writes to the first page."""
        rows = self._write_inputs(StepBatch((Span((token,), 0, [0], 1),)))
        self._program.run(0, max(1, round(self._body * share)), rows)

    def _compute_angles(self, spans: Sequence[Span], rows: int) -> None:
        for rope, places in self._changing.items():
            for place, value in zip(places, cos_sin(rope, *positions_of(spans)), strict=True):
                place[:rows] = value

    def _score(self, rows: Sequence[int]) -> Tensor:
        """float32 [R, vocab]: logits of these rows of the step computed last."""
        if rows != self._scored_rows:
            self._set_scored(rows)
            self.clock.lap(Stage.INPUTS)
            self._run_head()
            self.clock.lap(Stage.PROGRAM)
        return self._scored_logits

    def _set_scored(self, rows: Sequence[int]) -> None:
        if len(rows) != len(self._scored_rows):
            self._scored_logits = self._logits[: len(rows)]
        self._scored_rows = rows
        for i, row in enumerate(rows):
            self._scored[i] = row

    def _run_head(self) -> None:
        if self._scored_rows:
            self._program.run(self._body, self._end, len(self._scored_rows))

    def logits_of(self, step: RecordedStep, rows: Sequence[int]) -> Tensor:
        return self._score(rows)

    def kept(self, step: RecordedStep) -> Mapping[int, Tensor]:
        return {block: hidden[: step.batch.num_tokens] for block, hidden in self._kept.items()}

    def counters(self) -> Counters:
        return NOTHING_COUNTED


def _num_pages(caches: Caches) -> int:
    """Number of KV pages; 1 if no cache has pages, because no kernel reads the table."""
    return next((cache.num_pages for layer in caches for cache in layer if cache.num_pages is not None), 1)


def _numbers(recorder: Recorder, count: int) -> Tensor:
    """A zeroed int64 [count] buffer that the program reads."""
    return recorder.keep(torch.zeros(count, dtype=torch.int64))


def _is_kept(rope: Rope, context_tokens: int) -> bool:
    """Whether the angles of all positions are computed at start: if they are fixed and the context is short enough."""
    return not rope.dynamic and context_tokens <= KEPT_POSITIONS


def _angles(rope: Rope, positions: Tensor, context_tokens: int, recorder: Recorder) -> tuple[Tensor, Tensor]:
    """Buffers of cos and sin of a step's rows: gathered by the program from those of all positions, or written before
    each step."""
    if _is_kept(rope, context_tokens):
        every = torch.arange(context_tokens)
        cos, sin = cos_sin(rope, every, every + 1)
        return recorder.take(cos, positions), recorder.take(sin, positions)
    shape = (recorder.rows, rope.dim // 2)
    return recorder.keep(torch.zeros(shape)), recorder.keep(torch.zeros(shape))
