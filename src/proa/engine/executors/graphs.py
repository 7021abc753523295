"""Executes steps on a GPU. Decode steps are CUDA graphs, captured when their batch size first comes, and so are steps
with short prompts from the second of a size on, those in parts block by block (block_graphs.py); others are launched
op by op. Belongs here: static buffers, capturing, waiting. Never: requests, sampling rules.

A graph bakes in addresses, so everything that changes between steps lies in DeviceInputs; what one graph leaves for
another (hidden states, logits) is copied to buffers outside the memory pool that all graphs share and reuse.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from proa.cache.pool import copy_states
from proa.engine.executors.ahead import PartsAhead
from proa.engine.executors.angles import AngleTables
from proa.engine.executors.batch import Span, StepBatch, StepLimits, StepResult
from proa.engine.executors.block_graphs import BlockGraphs
from proa.engine.executors.clock import Stage, StepClock
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.device_queue import Mark
from proa.engine.executors.device_steps import DeviceSteps
from proa.engine.executors.executor import Pace, prompt_logprobs, step_result, unfinished
from proa.engine.executors.parts import BlockByBlock, Chunk, non_finite_rows
from proa.engine.executors.queues import Queues
from proa.engine.executors.session import NoSession, Session
from proa.engine.executors.step_timer import StepTimer
from proa.engine.executors.watch import WatchedSession, WatchedStep
from proa.layers.decoder import Decoder
from proa.native.doorbell import Counters
from proa.ops.caches import Caches
from proa.ops.device_table import DeviceOps
from proa.ops.host_block import HostBlock
from proa.ops.sizes import FEW_ROWS, warm_rows
from proa.plan.budget import row_bytes
from proa.sampling.choose import SampledToken
from proa.sampling.rows import Row
from proa.types import TokenLogprob

WARM_BUCKETS = 3  # decode graphs that are captured before the first request
WARM_UP_RUNS = 2  # before a capture: kernels are compiled and loaded, libraries take their workspaces
_NON_FINITE = -1  # the argmax of a row with NaN or infinity
_MOST_PARTS_AHEAD = 2  # parts that the device has not finished: a cancelled step ends only after them
_MOST_IN_FLIGHT = 32  # launches of steps and of parts, before the host waits for the device


@dataclass(frozen=True)
class _Captured:
    inputs: DeviceInputs
    replay: Callable[[], None]


@dataclass(eq=False)
class GraphStep(WatchedStep):
    """graph: None for steps launched op by op. size: the rows that a step in parts is padded to, if it may have
    graphs of its blocks. hidden: of a step in parts that is done, as Parts.hidden. samplings: how each of `rows` is
    sampled. done: a mark after the head."""

    graph: _Captured | None = None
    size: int | None = None
    hidden: Sequence[Tensor] | None = None
    samplings: Sequence[Row] = ()
    done: Mark | None = None
    num_launched: int = 0  # the session's number of launches at `done`


class GraphExecutor:
    """All calls come from one thread. Decode steps, heads and samples are launched to one queue, prompts to another, if
    there are two: then prompts may run beside decode steps. The memory of their activations is that of one queue alone.
    """

    def __init__(
        self, model: Decoder, caches: Caches, limits: StepLimits, queues: Queues, ops: DeviceOps,
        session: Session | None = None, *, deterministic: bool = False, kept_blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """deterministic: decode steps have sizes at which a row has the same bits (sizes.deterministic_buckets); the
        rows of a step are then of one phase."""
        self.spec, self.clock = model.spec, StepClock()
        queue = queues.steps
        self._model, self.caches, self._limits, self._queues, self._queue = model, caches, limits, queues, queue
        self._session = WatchedSession(session or NoSession(), model.spec)
        self._angles = AngleTables(model.spec.ropes, limits, queue.device)
        self._on = DeviceSteps(model, caches, limits, self._angles, queue.device, ops, kept_blocks)
        self._deterministic = deterministic
        self._buckets = limits.decode_sizes(deterministic=deterministic)
        # By (sequences, rows of each, the session's variant).
        self._graphs: dict[tuple[int, int, int], _Captured] = {}
        self._prompts: dict[int, Callable[[], None] | None] = {}  # by rows; None: launched once, not captured yet
        self._heads: dict[int, Callable[[], None]] = {}
        self._room: Callable[[], None] | None = None  # never replayed: reserves memory of the graphs' pool, as the next
        self._prompt_room: Callable[[], None] | None = None
        self._scored = HostBlock((limits.head_rows,), torch.int64, queue.device)
        self._host_best = torch.zeros(limits.head_rows, dtype=torch.int32, pin_memory=queue.device.type == "cuda")
        self._unfinished: list[GraphStep] = []  # steps in parts; the last one is advanced
        self._parts_ahead: deque[Mark] = deque()  # one after each of the last parts that were launched in turns
        self._ahead = PartsAhead()  # of the step that runs beside whole steps
        self._late: set[str] = set()  # requests for which the CPU sampled a token in the last steps
        self._blocks = BlockGraphs(model, self._on, self._session, queues.prompts, limits.block_rows)
        self._timer = StepTimer()
        queue.finish_device()  # weights, caches and buffers were filled outside this queue

    def warm_ups(self, *, compiled: bool) -> list[Callable[[], None]]:
        """Steps of padding that prepare what requests will need, the most needed first: graphs, what libraries load at
        first use, and, unless all is `compiled` already, kernels."""
        decode = (partial(self._warm_decode, bucket) for bucket in self._buckets[:WARM_BUCKETS])
        most = self._limits.rows
        prompts = sorted({min(2, most), most} - {1}) if compiled else warm_rows(most)
        return [*decode, self._warm_sampler, *(partial(self._warm_prefill, rows) for rows in prompts)]

    @torch.inference_mode()
    def _warm_decode(self, bucket: int) -> None:
        with self._queues.on_steps():
            self._capture(bucket, 1).inputs.take_tokens(self._on.best, bucket)  # loads the kernels of _follow
            self._capture_head(bucket)

    @torch.inference_mode()
    def _warm_sampler(self) -> None:
        with self._queues.on_steps():
            self._on.sampler.warm_up(self._on.logits, self._on.best)
            self._queue.finish()

    @torch.inference_mode()
    def _warm_prefill(self, rows: int) -> None:
        with self._queues.on_prompts():
            self._on.inputs.fill((), self._limits.page_tokens)
            self._begin()
            self._on.inputs.copy()
            self._on.run(self._on.inputs, rows)
            self._settle()
            non_finite_rows((self._on.hidden,), rows)

    # ---- launching

    @torch.inference_mode()
    def launch(self, batch: StepBatch, after: GraphStep | None = None) -> GraphStep:
        self._pause_parts()
        step, rows_each = GraphStep(batch, followed=after is not None), self._rows_each(batch)
        if not rows_each and self._unfinished:
            raise ValueError("between the parts of a step only steps with one row per sequence can be computed")
        wide = self._bucket(batch) * rows_each >= FEW_ROWS  # shares buffers with chunks of prompts
        with self._queues.on_steps(ordered=wide) if rows_each else self._queues.on_prompts():
            copy_states(self.caches, batch.copies_before)
            self._session.begin_step(step)
            if after is not None:
                self._follow(step, after)
            elif rows_each:
                self._decode(step, rows_each)
            else:
                self._launch_ops(batch)
            copy_states(self.caches, batch.copies_after)
        self.clock.lap(Stage.PROGRAM)
        return step

    @torch.inference_mode()
    def launch_in_parts(self, batch: StepBatch, share: float = 0.0) -> GraphStep:
        step = GraphStep(batch, overtakes=bool(self._unfinished))
        self._queues.apart = False
        self._pause_parts()
        with self._queues.on_prompts():
            copy_states(self.caches, batch.copies_before)
            self._begin_parts(step, share)
        self._queues.apart = step.alone and share > 0  # it need not wait for the decode step that comes next
        return step

    def runs_beside(self, step: GraphStep) -> bool:
        return step.alone

    def _bucket(self, batch: StepBatch) -> int:
        """The number of sequences that a decode step is padded to."""
        return self._buckets[min(bisect_left(self._buckets, len(batch.spans)), len(self._buckets) - 1)]

    def _rows_each(self, batch: StepBatch) -> int:
        """Rows per sequence if the step is decode, which runs as a graph; else 0."""
        if self._deterministic:
            return 0 if batch.spans[0].in_prompt else 1
        return batch.rows_each

    def _decode(self, step: GraphStep, rows_each: int) -> None:
        bucket = self._bucket(step.batch)
        key = bucket, rows_each, self._session.variant
        step.graph = captured = self._graphs.get(key) or self._capture(bucket, rows_each)
        self._fill(captured.inputs, step.batch.spans)
        self._begin()
        self._begin_time()
        captured.inputs.copy()
        captured.replay()
        self._session.launched()

    def _begin_time(self) -> None:
        """Time a decode step, unless a prompt is computed beside it: the time that it takes alone decides how long
        prompts may delay it, and must be known before one comes that could run beside it."""
        if not self._queues.apart and (self._unfinished or self._queues.separate):
            self._timer.begin(self._queues.steps)

    def _follow(self, step: GraphStep, after: GraphStep) -> None:
        """Launch a step whose tokens are copied on the device from the results of `after`. It replays the graph of
        `after`, with more padding if sequences have ended."""
        count, captured = len(step.batch.spans), after.graph
        if captured is None or count != len(after.spans):
            raise ValueError(
                f"a step that follows must continue all {len(after.spans)} spans sampled by a graph, but has {count}"
            )
        captured.inputs.fill(step.batch.spans, self._limits.page_tokens)
        after.next_step, step.graph = step, captured
        self._begin()
        self._begin_time()
        captured.inputs.copy()
        captured.inputs.take_tokens(self._on.best, count)
        captured.replay()
        self._session.launched()

    def _launch_ops(self, batch: StepBatch) -> None:
        rows = self._fill(self._on.inputs, batch.spans)
        launch = self._padded(rows) or partial(self._on.run, self._on.inputs, rows, batch.spans)
        self._begin()
        self._on.inputs.copy()
        launch()
        self._session.launched()

    def _padded(self, rows: int) -> Callable[[], None] | None:
        """Launches for this many rows of `inputs`, padded to a size that has a graph; None if no size is large enough.
        The first use of a size launches its ops one by one, which compiles and loads what the capture then needs."""
        size = next((size for size in self._limits.prompt_rows if size >= rows), None)
        if size is None:
            return None
        run = partial(self._on.run, self._on.inputs, size)
        if size not in self._prompts:
            self._prompts[size] = None
            return run
        replay = self._prompts[size]
        if replay is None:
            self._settle()
            self._prompt_room = self._prompt_room or self._queue.capture(self._take_prompt_room)
            self._prompts[size] = replay = self._queue.capture(run)
        return replay

    def _take_prompt_room(self) -> None:
        """Grow the graphs' pool to the activations of the largest prompt: see _take_room."""
        nbytes = self._limits.prompt_rows[-1] * row_bytes(self.spec)
        torch.empty(nbytes, dtype=torch.uint8, device=self._queue.device)[:1].zero_()  # a graph must have a node

    def _begin_parts(self, step: GraphStep, share: float) -> None:
        """Begin the pass, whose first copies then run meanwhile, and write the step's inputs, which no step between its
        parts touches. share: see launch_in_parts."""
        cut = self._limits.cut(step.batch.spans, decoding=share > 0)
        places = self._on.over_inputs if step.overtakes else self._on.chunk_inputs
        if step.overtakes and step.batch.num_tokens > (most := self._limits.over_rows):
            raise ValueError(f"a step that overtakes may have {most} rows, not {step.batch.num_tokens}")
        if len(cut) > len(places):
            raise ValueError(f"a step in parts may have {len(places)} chunks, not {len(cut)}")
        wide = min(sum(len(span.tokens) for span in spans) for spans in cut) >= FEW_ROWS
        may_run_beside = self._queues.separate and not step.overtakes and wide
        launching = self._session.begin_parts(step, len(cut), self._limits.cells, share if may_run_beside else None)
        if not step.overtakes and self._session.pass_is_regular:
            step.size = self._blocks.size(step.batch.num_tokens, len(cut))
        size = step.size
        chunks, row, beside = list[Chunk](), 0, step.alone and share > 0
        for spans, own in zip(cut, places, strict=False):
            rows = self._fill(own, spans)
            own.copy()
            if size and (replayed := self._blocks.begin(own, size, rows, self._on.kept, launching)):
                step.parts = replayed
                break
            tokens, inputs = self._on.step(own, size or rows, () if size else spans, beside_decode=beside)
            # Other steps overwrite the buffers of dynamic angles.
            angles = {rope: (cos.clone(), sin.clone()) for rope, (cos, sin) in inputs.angles.items()}
            chunks.append(Chunk(row, tokens, replace(inputs, angles=angles)))
            row += rows
        else:
            step.parts = BlockByBlock(self._model, chunks, self._on.kept, launching)
        self._unfinished.append(step)
        self._timer.forget_blocks()

    @torch.inference_mode()
    def advance(self, step: GraphStep, blocks: int) -> bool:
        parts = unfinished(step.parts)
        self._queues.apart = False
        if parts.done:  # launched beside whole steps
            return True
        with self._queues.on_prompts():
            if len(self._parts_ahead) == _MOST_PARTS_AHEAD:
                self._parts_ahead.popleft().wait()
            if not step.alone:
                self._begin()
            self._timer.begin(self._queues.prompts)
            self._timer.end(parts.advance(blocks))
            self._parts_ahead.append(self._queues.prompts.mark())
            if not step.alone:
                self._session.launched()
                if parts.done:
                    self._session.end_parts(step)
            if parts.done:
                copy_states(self.caches, step.batch.copies_after)
                self._blocks.launched(step.size)
        self.clock.lap(Stage.PROGRAM)
        return parts.done

    @torch.inference_mode()
    def keep_ahead(self, step: GraphStep) -> bool:
        parts, room = unfinished(step.parts), self._ahead.room
        if not step.alone:
            raise ValueError("a step that needs the CPU cannot run beside others: advance it between them")
        self._queues.apart = True
        while room and not parts.done:
            room -= 1
            with self._queues.on_prompts():
                begin = self._queues.prompts.mark(timed=True)
                parts.advance(1)
                if parts.done:
                    copy_states(self.caches, step.batch.copies_after)
                self._ahead.launched(begin, self._queues.prompts.mark(timed=True))
        return parts.done and not self._ahead.pending

    def ended(self, step: GraphStep) -> bool:
        return step.done is not None and step.done.passed

    def done_share(self, step: GraphStep) -> float:
        return unfinished(step.parts).done_share

    def _fill(self, inputs: DeviceInputs, spans: Sequence[Span]) -> int:
        """Write the step's inputs and angles on the host. Returns the number of rows."""
        rows = inputs.fill(spans, self._limits.page_tokens)
        self._angles.fill(spans)
        self.clock.lap(Stage.INPUTS)
        return rows

    def _capture(self, bucket: int, rows_each: int) -> _Captured:
        """Capture the decode graph of `bucket` sequences. Its inputs are padding until they are filled."""
        inputs = self._on.decode_inputs(bucket, rows_each)
        inputs.fill((), self._limits.page_tokens)
        inputs.copy()
        with self._session.decoding():
            replay = self._graph(lambda: self._on.run(inputs, bucket * rows_each))
        self._graphs[bucket, rows_each, self._session.variant] = made = _Captured(inputs, replay)
        return made

    def keep_graphs(self) -> None:
        """Drop the graphs of other variants than the session's present one."""
        present = self._session.variant
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[2] == present}

    def _capture_head(self, bucket: int) -> Callable[[], None]:
        self._settle()
        self._room = self._room or self._graph(self._take_room)
        self._heads[bucket] = self._graph(lambda: self._on.run_head(bucket))
        return self._heads[bucket]

    def _take_room(self) -> None:
        """Grow the graphs' pool to the largest head's logits: captures reuse what earlier ones have freed, but logits
        that grow from bucket to bucket would each take new memory."""
        torch.zeros(self._limits.head_rows, self.spec.vocab, device=self._queue.device)

    def _graph(self, launch: Callable[[], None]) -> Callable[[], None]:
        self._begin()
        for _ in range(WARM_UP_RUNS):
            launch()
        self._settle()
        return self._queue.capture(launch)

    # ---- sampling

    @torch.inference_mode()
    def sample(self, step: GraphStep, spans: Sequence[int], rows: Sequence[Row]) -> None:
        step.spans, step.rows, step.samplings = spans, step.batch.rows_of(spans), rows
        if step.parts is not None:
            self._queues.apart = False
            with self._queues.on_prompts():
                step.hidden = step.parts.hidden
            self._remove(step)
        with self._queues.on_steps():
            if step.alone:  # its launches were not counted: one that is follows them all
                self._begin()
                self._session.end_parts(step)
            self._launch_head(step, step.rows, rows)
            self._timer.end()
            step.done, step.num_launched = self._queue.mark(), self._session.num_launched
        self.clock.lap(Stage.PROGRAM)

    def _launch_head(self, step: GraphStep, rows: Sequence[int], samplings: Sequence[Row]) -> None:
        """Compute logits of these rows of the step and sample them. samplings: how each is sampled; empty: argmax of
        each."""
        count = len(rows)
        if not count:
            return
        bucket = min(size for size in (*self._buckets, self._limits.head_rows) if size >= count)
        head = self._heads.get(bucket) or self._capture_head(bucket)
        self._scored.host[:count] = torch.tensor(rows)
        self._scored.host[count:bucket] = 0
        self.clock.lap(Stage.INPUTS)
        self._scored.copy_to(self._on.scored, bucket)
        if step.hidden is not None:
            self._on.bring(step.hidden, rows, bucket)
        head()
        if samplings:
            self._on.sampler.launch(self._on.logits, self._on.best, samplings)
        self._host_best[:count].copy_(self._on.best[:count], non_blocking=True)

    @torch.inference_mode()
    def wait(self, step: GraphStep) -> StepResult:
        """See Executor. Waits for the step's own end, not for launches after it."""
        if step.done is None:
            raise ValueError("wait() needs a step that was sampled: call sample() first, also for a step with no spans")
        step.done.wait()
        self._session.end_until(step.num_launched)
        with self._queues.on_steps():
            tokens: list[int] = self._host_best[: len(step.rows)].tolist()
            bad = {row for row, token in zip(step.rows, tokens, strict=True) if token == _NON_FINITE}
            choices = self._read_choices(step, tokens)
            between = bool(self._unfinished)
            hidden = (self._on.hidden,) if step.hidden is None else step.hidden
            faults = self._session.step_faults(step, bad, hidden, between_parts=between)
            result = step_result(step.batch, step.spans, choices, faults)
            result.prompt_logprobs = prompt_logprobs(step.batch, partial(self._logprobs, step), self._limits.cells)
        result.streamed, step.next_step = step.streamed, None
        self.clock.lap(Stage.PROGRAM)
        return result

    def _read_choices(self, step: GraphStep, tokens: Sequence[int]) -> list[SampledToken]:
        if not step.samplings:
            return []
        choices = self._on.sampler.read(tokens, step.samplings, self._on.logits)
        self._late |= {row.request for row, choice in zip(step.samplings, choices, strict=True) if choice.late}
        return choices

    def _logprobs(
        self, step: GraphStep, rows: Sequence[int], tokens: Sequence[int], top: int
    ) -> list[TokenLogprob]:  # fmt: skip
        self._launch_head(step, rows, ())
        self._on.logprobs.launch_given(self._on.logits, tokens, top)
        self._queue.finish()
        return self._on.logprobs.read(tokens)

    def can_follow(self, step: GraphStep) -> bool:
        """See Executor. Not if the CPU sampled a token for one of the requests lately: it may need to do so again, and
        the step that followed would be discarded."""
        if step.graph is None or self._angles.changing or self._session.num_in_flight != 1:
            return False
        self._late &= {row.request for row in step.samplings}
        return not self._late and all(not span.num_drafts for span in step.batch.spans)

    @torch.inference_mode()
    def cancel(self, step: GraphStep) -> None:
        self._queues.apart = False
        self._pause_parts()
        with self._queues.on_steps():
            self._queues.finish()
            self._session.end_until(self._session.num_launched)
            if step in self._unfinished:
                self._remove(step)
                self._session.forget_parts(step)

    def _remove(self, step: GraphStep) -> None:
        """Remove a step in parts. If another one goes on, its blocks are measured anew."""
        self._unfinished.remove(step)
        if step.alone:
            self._ahead.forget()
        if self._unfinished:
            self._timer.forget_blocks()

    def pace(self) -> Pace:
        return self._timer.pace()

    @torch.inference_mode()
    def logits_of(self, step: GraphStep, rows: Sequence[int]) -> Tensor:
        with self._queues.on_steps():
            self._launch_head(step, rows, ())
            self._queue.finish()
            return self._on.logits[: len(rows)].cpu()

    def kept(self, step: GraphStep) -> Mapping[int, Tensor]:
        return {block: hidden[: step.batch.num_tokens] for block, hidden in self._on.kept.items()}

    def counters(self) -> Counters:
        return self._session.counters()

    # ---- the session

    def _begin(self) -> None:
        if self._session.num_in_flight == _MOST_IN_FLIGHT:
            self._settle()
        self._session.begin()

    def _pause_parts(self) -> None:
        """Let the next launches give the CPU jobs, or the last ones end: the CPU has room for one job."""
        if self._session.pass_waits:
            with self._queues.on_prompts():
                self._session.pause_pass()

    def _settle(self) -> None:
        """Wait for all launches and end their sessions."""
        if self._session.num_in_flight:
            self._pause_parts()
            self._queues.finish()
            self._session.end_until(self._session.num_launched)
