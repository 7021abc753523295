"""Executes steps with ops that compute when they are called (plain torch, simulated GPU). Never: requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.executors.batch import Span, StepBatch, StepResult, chunks_of, positions_of
from proa.engine.executors.clock import Stage, StepClock
from proa.engine.executors.executor import FEW_TOKENS, Pace, prompt_logprobs, step_result, unfinished
from proa.engine.executors.parts import BlockByBlock, Chunk
from proa.engine.executors.session import NoSession, Session
from proa.engine.executors.watch import WatchedSession, WatchedStep
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.native.doorbell import Counters
from proa.ops.caches import Caches
from proa.ops.table import batch_of
from proa.plan.cells import Cells
from proa.sampling.choose import SampledToken, choose
from proa.sampling.logprobs import token_logprobs
from proa.sampling.rows import Row
from proa.types import TokenLogprob


@dataclass(eq=False)
class EagerStep(WatchedStep):
    """hidden: [T, hidden] after the last block. choices: one for each row of the sampled `spans`."""

    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    began_s: float = field(default_factory=time.perf_counter)
    choices: list[SampledToken] = field(default_factory=list)
    kept: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LikeGpu:
    """Schedules that a GPU allows. They are not faster here: all is computed when it is launched.

    overlap, beside: launch(after=...), and steps in parts beside whole ones, are possible. chunk_rows: most rows of a
    step in parts that are computed at once. cells: see StepLimits; sampled rows are then scored one by one, since the
    bits of torch's products depend on the number of rows."""

    overlap: bool = False
    beside: bool = False
    chunk_rows: int = sys.maxsize
    cells: Cells | None = None


class EagerExecutor:
    def __init__(
        self, model: Decoder, caches: Caches, page_tokens: int, session: Session | None = None,
        *, like: LikeGpu | None = None, kept_blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        like = like or LikeGpu()
        self.spec, self.clock = model.spec, StepClock()
        self._session = WatchedSession(session or NoSession(), model.spec)
        self._model, self.caches, self._page_tokens = model, caches, page_tokens
        self._chunk_rows, self._cells = like.chunk_rows, like.cells
        self._may_run_beside = like.beside
        self._ropes, self._overlap, self._kept_blocks = model.spec.ropes, like.overlap, kept_blocks
        self._unfinished: list[EagerStep] = []  # steps in parts; the last one is advanced
        self._step_s = self._block_s = 0.0
        self.decode_threads = self.prefill_threads = torch.get_num_threads()

    @torch.inference_mode()
    def launch(self, batch: StepBatch, after: EagerStep | None = None) -> EagerStep:
        step = EagerStep(batch, followed=after is not None)
        spans = batch.spans
        if after is not None:
            after.next_step = step
            spans = _continued(spans, self.tokens_to_follow(after))
        copy_states(self.caches, batch.copies_before)
        step.kept = {block: self._room(batch.num_tokens) for block in self._kept_blocks}
        self._session.begin_step(step)
        tokens, inputs = self._inputs(spans)
        self.clock.lap(Stage.INPUTS)
        torch.set_num_threads(self.decode_threads if len(tokens) <= FEW_TOKENS else self.prefill_threads)
        decodes = batch.rows_each and not any(span.in_prompt for span in batch.spans)
        with self._listening(), self._session.decoding() if decodes else nullcontext():
            step.hidden = self._model(tokens, inputs, step.kept)
        copy_states(self.caches, batch.copies_after)
        self.clock.lap(Stage.PROGRAM)
        return step

    @torch.inference_mode()
    def launch_in_parts(self, batch: StepBatch, share: float = 0.0) -> EagerStep:
        step = EagerStep(batch, overtakes=bool(self._unfinished))
        copy_states(self.caches, batch.copies_before)
        step.kept = {block: self._room(batch.num_tokens) for block in self._kept_blocks}
        step.parts = self._parts(step, share if self._may_run_beside and not step.overtakes else None)
        self._unfinished.append(step)
        self._block_s = 0.0
        self.clock.lap(Stage.INPUTS)
        return step

    def _parts(self, step: EagerStep, beside: float | None) -> BlockByBlock:
        chunks, row = list[Chunk](), 0
        for spans in chunks_of(step.batch.spans, self._chunk_rows, self._cells):
            tokens, inputs = self._inputs(spans)
            chunks.append(Chunk(row, tokens, inputs))
            row += len(tokens)
        launching = self._session.begin_parts(step, len(chunks), self._cells, beside)
        return BlockByBlock(self._model, chunks, step.kept, launching)

    def tokens_to_follow(self, step: EagerStep) -> list[int]:
        """The tokens that the next step continues with. A row without a token (-1) continues with any."""
        return [max(choice.token, 0) for choice in step.choices]

    def _inputs(self, spans: Sequence[Span]) -> tuple[Tensor, Step]:
        tokens = torch.tensor([t for s in spans for t in s.tokens])
        kv_lens = [s.start + len(s.tokens) for s in spans]
        q_lens, pages = [len(s.tokens) for s in spans], [s.pages for s in spans]
        batch = batch_of(q_lens, kv_lens, pages, self._page_tokens, [s.state for s in spans])
        positions, lengths = positions_of(spans)
        angles = {rope: cos_sin(rope, positions, lengths) for rope in self._ropes}
        return tokens, Step(batch, angles, self.caches)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which CPU workers answer the jobs of the step that is computed."""
        self._session.begin()
        try:
            yield
            self._session.launched()
        finally:
            self._session.end_until(self._session.num_launched)

    @torch.inference_mode()
    def advance(self, step: EagerStep, blocks: int) -> bool:
        began_s, parts = time.perf_counter(), unfinished(step.parts)
        with nullcontext() if step.alone else self._listening():
            count = parts.advance(blocks)
            self._session.pause_pass()
        self._block_s = (time.perf_counter() - began_s) / max(1, count)
        if parts.done:
            if not step.alone:
                self._session.end_parts(step)
            step.hidden = torch.cat(list(parts.hidden))
            copy_states(self.caches, step.batch.copies_after)
        self.clock.lap(Stage.PROGRAM)
        return parts.done

    def runs_beside(self, step: EagerStep) -> bool:
        return step.alone

    def keep_ahead(self, step: EagerStep) -> bool:
        return self.advance(step, 1)

    def ended(self, step: EagerStep) -> bool:
        return True

    def done_share(self, step: EagerStep) -> float:
        return unfinished(step.parts).done_share

    @torch.inference_mode()
    def sample(self, step: EagerStep, spans: Sequence[int], rows: Sequence[Row]) -> None:
        if step in self._unfinished:
            self._remove(step)
        if step.alone:  # its launches were not counted: one that is follows them all
            with self._listening():
                self._session.end_parts(step)
        step.spans, step.rows = spans, step.batch.rows_of(spans)
        if spans:
            each = [step.rows] if self._cells is None else [[row] for row in step.rows]
            logits = torch.cat([self._logits(step, rows_of) for rows_of in each])
            step.choices = choose(self._model.argmax(logits).tolist(), rows, logits)
        if step.parts is None:
            self._step_s = time.perf_counter() - step.began_s
        self.clock.lap(Stage.PROGRAM)

    def _logits(self, step: EagerStep, rows: Sequence[int]) -> Tensor:
        return self._model.logits(step.hidden[list(rows)])

    @torch.inference_mode()
    def wait(self, step: EagerStep) -> StepResult:
        bad = {row for row, choice in zip(step.rows, step.choices, strict=True) if choice.token < 0}
        between = bool(self._unfinished)
        faults = self._session.step_faults(step, bad, (step.hidden,), between_parts=between)
        result = step_result(step.batch, step.spans, step.choices, faults)
        result.prompt_logprobs = prompt_logprobs(step.batch, partial(self._score, step), self._cells)
        result.streamed, step.next_step = step.streamed, None
        return result

    def _score(self, step: EagerStep, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        return token_logprobs(self._logits(step, rows), tokens, top)

    def can_follow(self, step: EagerStep) -> bool:
        decodes = all(len(span.tokens) == 1 for span in step.batch.spans)
        return self._overlap and decodes and not self._unfinished

    def cancel(self, step: EagerStep) -> None:
        if step in self._unfinished:
            self._remove(step)
            self._session.forget_parts(step)

    def _remove(self, step: EagerStep) -> None:
        """Remove a step in parts. If another one goes on, its blocks are measured anew."""
        self._unfinished.remove(step)
        if self._unfinished:
            self._block_s = 0.0

    def pace(self) -> Pace:
        return Pace(self._step_s, self._block_s)

    @torch.inference_mode()
    def logits_of(self, step: EagerStep, rows: Sequence[int]) -> Tensor:
        return self._logits(step, rows)

    def kept(self, step: EagerStep) -> Mapping[int, Tensor]:
        return step.kept

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, self.spec.hidden, dtype=self._model.norm.norm.weight.dtype)

    def counters(self) -> Counters:
        return self._session.counters()


def _continued(spans: Sequence[Span], tokens: Sequence[int]) -> list[Span]:
    """The spans with their tokens filled in, which were not known when they were planned."""
    if len(tokens) != len(spans):
        raise ValueError(f"a step that follows must continue all {len(tokens)} sampled spans, but has {len(spans)}")
    return [msgspec.structs.replace(s, tokens=(t,)) for s, t in zip(spans, tokens, strict=True)]
