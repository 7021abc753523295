"""Runs a step's rows on a GPU. Steps of one token a sequence are CUDA graphs, captured when their batch size first
comes; others are launched op by op. Belongs here: static buffers, capturing, waiting. Never: requests, drawing.

A graph bakes addresses in, so everything that changes between steps stands in DeviceInputs; what one graph leaves for
another (hidden states, logits) is copied to buffers outside of the graphs' common pool, which each of them reuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.angles import AngleTables
from proa.engine.clock import Stage, StepClock
from proa.engine.device_inputs import DeviceInputs
from proa.engine.device_steps import DeviceSteps
from proa.engine.marks import Marks
from proa.engine.parts import Parts, begun, not_finite
from proa.engine.session import NoSession, Session
from proa.engine.spans import Span, StepLimits
from proa.engine.watch import WatchedSession
from proa.layers.decoder import Decoder
from proa.native.doorbell import Counters
from proa.ops.sizes import buckets
from proa.ops.table import LayerCache
from proa.sampling.choose import SampledToken
from proa.sampling.rows import Row
from proa.types import TokenLogprob

WARM_BUCKETS = 3  # decode graphs that are there before the first request
_NONE = -1  # the best token of a row that is not finite
_MOST_UNDERWAY = 32  # steps, or parts of a prompt's, launched behind each other while nobody asks for tokens
WARM_UP_RUNS = 2  # before a capture: kernels are compiled and loaded, libraries take their workspaces


@dataclass(frozen=True)
class _Captured:
    inputs: DeviceInputs
    graph: torch.cuda.CUDAGraph


class GraphExecutor:
    """All calls come from one thread, which is bound to the device's stream here."""

    def __init__(
        self, model: Decoder, caches: tuple[LayerCache, ...], limits: StepLimits, device: torch.device,
        session: Session | None = None, *, sleeps: bool = False, deterministic: bool = False,
    ) -> None:  # fmt: skip
        """sleeps: the calling thread leaves its CPU to others while it waits for the device, and comes back a little
        later. deterministic: all steps of decode have one shape, for kernels and their splits follow from the number
        of rows; steps have prompts or decode, not both."""
        self.spec, self.clock = model.spec, StepClock()
        self._model, self._caches, self._limits, self._device = model, caches, limits, device
        self._session = WatchedSession(session or NoSession(), model.spec)
        self._angles = AngleTables(model.spec.ropes, limits, device)
        self._on = DeviceSteps(model, caches, limits, self._angles, device)
        self._deterministic = deterministic
        self._buckets = decode_sizes(limits, deterministic=deterministic)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[int, _Captured] = {}
        self._heads: dict[int, torch.cuda.CUDAGraph] = {}
        self._room: torch.cuda.CUDAGraph | None = None  # never replayed: holds memory of the graphs' pool
        self._host_scored = torch.zeros(limits.head_rows, dtype=torch.int64).pin_memory()
        self._host_best = torch.zeros(limits.head_rows, dtype=torch.int32).pin_memory()
        self._rows: Sequence[int] = ()  # of the last step, that were scored last
        self._underway = 0  # steps and parts launched whose end has not been waited for
        self._behind = 0  # of these, launched behind what was scored last
        self._decoding = self._ahead = False  # the last one is a graph's; another one follows it already
        self._captured: _Captured | None = None  # that graph
        self._next: Sequence[Span] = ()  # of the one that follows
        self._follows = False  # the last one followed another itself: all its rows that anybody wants are scored
        self._asked: Sequence[Row] = ()
        self._late: set[str] = set()  # requests of the last steps of which the CPU drew a token
        self._sequences: Sequence[Span] = ()
        self._suspect = False  # whether the last step may have rows that are not finite
        self._bad: set[int] = set()  # its rows whose logits are not
        self._early: dict[int, str] = {}  # sequences that its successor may have broken, and why
        self._parts: Parts | None = None  # of a step that is computed between others
        self._was_in_parts = False  # the last one
        self._marks = Marks()
        torch.cuda.synchronize(device)  # weights, caches and buffers were filled on streams that this one never awaits

    def warm_ups(self, *, compiled: bool) -> list[Callable[[], None]]:
        """Steps of padding alone that make ready what requests will need, the most needed first: graphs, what libraries
        load at first use, and, unless all is `compiled` already, kernels."""
        decode = (partial(self._warm_decode, bucket) for bucket in self._buckets[:WARM_BUCKETS])
        most = self._limits.rows
        prompts = sorted({min(2, most), most} - {1}) if compiled else warm_rows(most)
        return [*decode, self._warm_sampler, *(partial(self._warm_prefill, rows) for rows in prompts)]

    @torch.inference_mode()
    def _warm_decode(self, bucket: int) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._capture(bucket)
            self._capture_head(bucket)

    @torch.inference_mode()
    def _warm_sampler(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._on.sampler.warm_up(self._on.logits, self._on.best)
            self._wait()

    @torch.inference_mode()
    def _warm_prefill(self, rows: int) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._on.inputs.fill((), self._limits.page_tokens)
            self._begin()
            self._on.inputs.copy()
            self._on.run(self._on.inputs, rows)
            self._settle()

    @torch.inference_mode()
    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        if self._parts is None:
            self._settle()
        self._was_in_parts = False
        self._sequences, self._suspect = sequences, True  # until all rows are scored
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._decoding = self._is_decode(sequences)
            if self._decoding:
                self._decode(sequences)
            elif self._parts is not None:
                raise ValueError("between the parts of a step there is room for steps of one token a sequence")
            else:
                self._launch(sequences)
        self.clock.lap(Stage.PROGRAM)

    def _is_decode(self, sequences: Sequence[Span]) -> bool:
        """Whether a step is a graph's."""
        if self._deterministic:
            return not sequences[0].in_prompt
        return all(len(s.tokens) == 1 for s in sequences)

    def _decode(self, sequences: Sequence[Span]) -> None:
        bucket = self._bucket(len(sequences))
        self._captured = captured = self._steps.get(bucket) or self._capture(bucket)
        captured.inputs.fill(sequences, self._limits.page_tokens)
        self._angles.fill(sequences)
        self.clock.lap(Stage.INPUTS)
        self._begin()
        if self._parts is not None:
            self._marks.begin(self._stream)
        captured.inputs.copy()
        captured.graph.replay()
        self._session.launched()

    def _bucket(self, count: int) -> int:
        return self._buckets[bisect_left(self._buckets, count)]

    def _launch(self, sequences: Sequence[Span]) -> None:
        rows = self._on.inputs.fill(sequences, self._limits.page_tokens)
        self._angles.fill(sequences)
        self.clock.lap(Stage.INPUTS)
        self._begin()
        self._on.inputs.copy()
        self._on.run(self._on.inputs, rows)
        self._session.launched()
        self._settle()  # a step without rows to score is followed by no call that would wait

    @torch.inference_mode()
    def begin(self, sequences: Sequence[Span]) -> None:
        """Steps between its parts have graphs: nobody else uses the inputs of other steps."""
        self._settle()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            rows = self._on.inputs.fill(sequences, self._limits.page_tokens)
            self._angles.fill(sequences)
            self._on.inputs.copy()
            tokens, step = self._on.step(self._on.inputs, rows)
            # Angles of other steps come to where these are.
            angles = {rope: (cos.clone(), sin.clone()) for rope, (cos, sin) in step.angles.items()}
            self._parts = Parts(self._model, sequences, tokens, replace(step, angles=angles))
        self.clock.lap(Stage.INPUTS)

    @torch.inference_mode()
    def advance(self, blocks: int) -> bool:
        parts = begun(self._parts)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._begin()
            self._behind += 1
            self._marks.begin(self._stream)
            with self._session.in_parts():
                count = parts.advance(blocks)
            self._marks.end(self._stream, count)
            self._session.launched()
        self.clock.lap(Stage.PROGRAM)
        return parts.done

    @torch.inference_mode()
    def end(self) -> None:
        parts, self._parts = begun(self._parts), None
        self._sequences, self._suspect = parts.sequences, True
        self._was_in_parts, self._decoding = True, False
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._on.hidden[: len(parts.hidden)].copy_(parts.hidden)

    @torch.inference_mode()
    def drop(self) -> None:
        parts, self._parts = begun(self._parts), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._settle()
            self._session.forget_parts(parts.sequences)

    def turns_s(self) -> tuple[float, float]:
        return self._marks.step_s, self._marks.block_s

    def _capture(self, bucket: int) -> _Captured:
        """A graph of steps of `bucket` sequences. Its inputs are padding until they are filled."""
        inputs = self._on.decode_inputs(bucket)
        inputs.fill((), self._limits.page_tokens)
        inputs.copy()
        graph = self._graph(lambda: self._on.run(inputs, bucket))
        self._steps[bucket] = _Captured(inputs, graph)
        return self._steps[bucket]

    def _capture_head(self, bucket: int) -> torch.cuda.CUDAGraph:
        self._settle()
        if self._room is None:
            self._room = self._graph(self._take_room)
        self._heads[bucket] = self._graph(lambda: self._on.run_head(bucket))
        return self._heads[bucket]

    def _take_room(self) -> None:
        """Make the graphs' pool as large as the largest head's logits need. Captures reuse what earlier ones have freed
        there; logits that grow from bucket to bucket would each take memory anew."""
        torch.zeros(self._limits.head_rows, self.spec.vocab, device=self._device)

    def _graph(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._begin()
        for _ in range(WARM_UP_RUNS):
            launch()
        self._settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        return graph

    @torch.inference_mode()
    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy_states(self._caches, slots)
        self.clock.lap(Stage.PROGRAM)

    @torch.inference_mode()
    def score(self, rows: Sequence[int]) -> list[int]:
        self._launch_head(rows, ())
        self._finish()
        self.clock.lap(Stage.PROGRAM)
        return self._tokens()

    @torch.inference_mode()
    def explain(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        self._launch_head(rows, ())
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._on.logprobs.launch_given(self._on.logits, tokens, top)
            self._done.record(self._stream)
        self._finish()
        self.clock.lap(Stage.PROGRAM)
        return self._on.logprobs.read(tokens)

    @torch.inference_mode()
    def sample(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        """No rows: of the step nothing but its end is of interest."""
        self._follows = self._ahead
        if self._follows:
            self._sequences = self._next
        self._asked, self._ahead = asked, False
        self._launch_head(rows, asked)
        self.clock.lap(Stage.PROGRAM)

    @torch.inference_mode()
    def choices(self) -> list[SampledToken]:
        self._finish()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            choices = self._on.sampler.read(self._tokens(), self._asked, self._on.logits) if self._asked else []
        self._late |= {row.request for row, choice in zip(self._asked, choices, strict=True) if choice.late}
        self.clock.lap(Stage.PROGRAM)
        return choices

    def can_follow(self) -> bool:
        """Requests of which the CPU drew a token once may need it again: what followed would be for nothing."""
        if not self._decoding or self._angles.changing or self._underway != 1:
            return False
        self._late &= {row.request for row in self._asked}
        return not self._late

    @torch.inference_mode()
    def follow(self, sequences: Sequence[Span]) -> None:
        """Sequences are those that were asked for, in their order: each one's token is copied from where it is drawn.
        Where they are fewer than they were, the same graph has more padding."""
        count, captured = len(sequences), self._captured
        if captured is None or count != len(self._asked):
            raise ValueError(f"{count} sequences cannot follow {len(self._asked)}")
        captured.inputs.fill(sequences, self._limits.page_tokens)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._begin()
            self._behind += 1
            self._ahead, self._next = True, sequences
            captured.inputs.copy()
            tokens = captured.inputs.tokens[:count]
            tokens.copy_(self._on.best[:count])
            tokens.clamp_(min=0)  # there is no token of a row that is not finite, or that the CPU draws
            captured.graph.replay()
            self._session.launched()

    def _launch_head(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        """asked: of each row what it draws, or nothing at all: then each has its best token."""
        self._rows, count = rows, len(rows)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if count:
                bucket = min(size for size in (*self._buckets, self._limits.head_rows) if size >= count)
                head = self._heads.get(bucket) or self._capture_head(bucket)
                self._host_scored[:count] = torch.tensor(rows)
                self.clock.lap(Stage.INPUTS)
                self._on.scored[:bucket].copy_(self._host_scored[:bucket], non_blocking=True)
                head.replay()
                if asked:
                    self._on.sampler.launch(self._on.logits, self._on.best, asked)
                self._host_best[:count].copy_(self._on.best[:count], non_blocking=True)
            self._marks.end(self._stream)
            self._done.record(self._stream)
        self._behind = 0

    def _finish(self) -> None:
        """Wait for what the last head was launched behind, but for nothing that was launched behind that."""
        self._done.synchronize()
        self._marks.read()
        while self._underway > self._behind:
            self._underway -= 1
            self._session.end()

    def _tokens(self) -> list[int]:
        """Of the rows scored last."""
        tokens: list[int] = self._host_best[: len(self._rows)].tolist()
        rows_of_step = sum(len(s.tokens) for s in self._sequences)
        bad = {row for row, token in zip(self._rows, tokens, strict=True) if token == _NONE}
        broke, self._bad = bool(self._bad), bad
        # A row that broke is in the next step too, and may have left a note there.
        self._suspect = broke or bool(bad) or (len(tokens) < rows_of_step and not self._follows)
        return tokens

    @torch.inference_mode()
    def broken(self) -> dict[int, str]:
        """Decode looks for nothing that its logits do not show. Where a step follows, what is known may be about that
        one: nobody ends before the logits of a step of its own show it."""
        if self._parts is not None or self._was_in_parts:
            return self._broken_in_turns()
        if not self._ahead:
            self._settle()
        found, self._early = self._early, {}
        if self._suspect or self._session.complained:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                found = self._session.broken(self._sequences, look=self._suspect) | found
        if not (self._ahead or self._follows):
            return found
        if self._ahead and len(self._next) < len(self._sequences):
            return {}  # rows have moved up: notes may be of either step
        if self._ahead:
            self._early = {place: why for place, why in found.items() if place not in self._bad}
        return {place: why for place, why in found.items() if place in self._bad}

    def _broken_in_turns(self) -> dict[int, str]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if not self._was_in_parts:
                return self._session.broken_between(self._sequences, self._bad)
            self._settle()
            rows = sum(len(s.tokens) for s in self._sequences)
            return self._session.broken_parts(self._sequences, not_finite(self._on.hidden[:rows]))

    @property
    def logits(self) -> Tensor:
        return self._on.logits[: len(self._rows)].cpu()

    def counters(self) -> Counters:
        return self._session.counters()

    def _begin(self) -> None:
        if self._underway == _MOST_UNDERWAY:
            self._settle()
        self._session.begin()
        self._underway += 1

    def _settle(self) -> None:
        """Wait for what was launched; what it could tell has been told."""
        if self._underway:
            self._wait()
        while self._underway:
            self._underway -= 1
            self._session.end()
        self._behind = 0

    def _wait(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()


def decode_sizes(limits: StepLimits, *, deterministic: bool) -> tuple[int, ...]:
    """Numbers of sequences that a step of decode is padded to."""
    most = min(limits.sequences, limits.rows)
    return (most,) if deterministic else buckets(most)


def warm_rows(most: int) -> list[int]:
    """Prefills that between them run every kernel there is for up to `most` rows: kernels change at powers of two, and
    are compiled once more for numbers that 16 divides."""
    powers = [1 << i for i in range(1, most.bit_length())]
    return sorted({rows for power in powers for rows in (power, power + 1) if rows <= most} | {most} - {1})
