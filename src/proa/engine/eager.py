"""Runs a step's rows through a model whose ops compute when they are called. Never: requests, drawing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.clock import Stage, StepClock
from proa.engine.executor import FEW_TOKENS, ChoosesOnTheCpu
from proa.engine.parts import Parts, begun, not_finite
from proa.engine.session import NoSession, Session
from proa.engine.spans import Span, positions_of
from proa.engine.watch import WatchedSession
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.native.doorbell import Counters
from proa.ops.table import LayerCache, batch_of


class EagerExecutor(ChoosesOnTheCpu):
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
        self._best: list[int] = []
        self._rows: Sequence[int] = ()
        self._parts: Parts | None = None  # of a step that is computed between others
        self._was_in_parts = False  # the last one
        self._began = self._step_s = self._block_s = 0.0
        self.decode_threads = self.prefill_threads = torch.get_num_threads()

    @torch.inference_mode()
    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        self._began, self._was_in_parts = time.perf_counter(), False
        tokens, step = self._inputs(sequences)
        torch.set_num_threads(self.decode_threads if len(tokens) <= FEW_TOKENS else self.prefill_threads)
        self._sequences = sequences
        self.clock.lap(Stage.INPUTS)
        with self._listening():
            self._hidden = self._model(tokens, step)
        self.clock.lap(Stage.PROGRAM)

    def _inputs(self, sequences: Sequence[Span]) -> tuple[Tensor, Step]:
        tokens = torch.tensor([t for s in sequences for t in s.tokens])
        kv_lens = [s.start + len(s.tokens) for s in sequences]
        q_lens, pages = [len(s.tokens) for s in sequences], [s.pages for s in sequences]
        batch = batch_of(q_lens, kv_lens, pages, self._page_tokens, [s.state for s in sequences])
        positions, lengths = positions_of(sequences)
        angles = {rope: cos_sin(rope, positions, lengths) for rope in self._ropes}
        return tokens, Step(batch, angles, self._caches)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """The CPU does its part of what is computed now."""
        self._session.begin()
        try:
            yield
            self._session.launched()
        finally:
            self._session.end()

    @torch.inference_mode()
    def begin(self, sequences: Sequence[Span]) -> None:
        self._parts = Parts(self._model, sequences, *self._inputs(sequences))
        self.clock.lap(Stage.INPUTS)

    @torch.inference_mode()
    def advance(self, blocks: int) -> bool:
        began, parts = time.perf_counter(), begun(self._parts)
        with self._listening(), self._session.in_parts():
            count = parts.advance(blocks)
        self._block_s = (time.perf_counter() - began) / max(1, count)
        self.clock.lap(Stage.PROGRAM)
        return parts.done

    def end(self) -> None:
        parts, self._parts = begun(self._parts), None
        self._hidden, self._sequences, self._was_in_parts = parts.hidden, parts.sequences, True

    def drop(self) -> None:
        parts, self._parts = begun(self._parts), None
        self._session.forget_parts(parts.sequences)

    def turns_s(self) -> tuple[float, float]:
        return self._step_s, self._block_s

    @torch.inference_mode()
    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        copy_states(self._caches, slots)
        self.clock.lap(Stage.PROGRAM)

    @torch.inference_mode()
    def score(self, rows: Sequence[int]) -> list[int]:
        self._logits = self._model.logits(self._hidden[list(rows)])
        self._rows, self._best = rows, self._model.argmax(self._logits).tolist()
        self._step_s = time.perf_counter() - self._began
        self.clock.lap(Stage.PROGRAM)
        return self._best

    def broken(self) -> dict[int, str]:
        if self._was_in_parts:
            return self._session.broken_parts(self._sequences, not_finite(self._hidden))
        if self._parts is not None:
            bad = [row for row, best in zip(self._rows, self._best, strict=True) if best < 0]
            return self._session.broken_between(self._sequences, bad)
        return self._session.broken(self._sequences, look=True)

    @property
    def logits(self) -> Tensor:
        return self._logits

    def counters(self) -> Counters:
        return self._session.counters()
