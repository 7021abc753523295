"""Runs a planned model's steps without a GPU or weights, to find the kernels that they launch. Belongs here: the kinds
of steps, the most needed first. Never: compiling, a list of kernels.

The code is the GPU's own (engine/building/gpu.py, engine/executors/graphs.py), on tensors of torch's "meta" device,
which have shapes and dtypes but no memory. Blocks that launch no other kernels are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import Tensor

from proa.cache.keys import run_pages
from proa.cache.pool import KvStorage, allocate_pool
from proa.engine.building.dtypes import DTYPES
from proa.engine.building.gpu_plan import least_rows, needed, pass_mode, placement_of, top_k
from proa.engine.executors.batch import Span, step_limits
from proa.engine.executors.device_steps import DeviceSteps
from proa.engine.executors.graphs import WARM_BUCKETS
from proa.engine.executors.page_copies import layout_of
from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers, Copy, Pairs
from proa.hybrid.gpu_experts import GpuExperts, GpuSpaces, InPlace
from proa.hybrid.gpu_ways import ByCopies, ByKernels, GpuWay
from proa.hybrid.model import HybridModel, Parts, PromptParts
from proa.hybrid.transport import empty_round
from proa.hybrid.uploads import Fetched, HostFetched, HostMark, Transfer, Upload
from proa.hybrid.ways import WAYS
from proa.layers.decoder import Decoder
from proa.machine.cost.prefill import PROBED_LAYERS, CpuExpertCost, PrefillRates
from proa.models.spec import Model, Rope
from proa.native.doorbell import NOTHING_COUNTED, Counters, JobSize, Way, block_layout
from proa.native.pool import Pool
from proa.native.weights import Experts
from proa.ops.bell_block import STATE_WORDS, Bell
from proa.ops.cuda import CudaOps
from proa.ops.cuda_attention import CudaAttention, SegmentedAttention, segments_of, tiles_of
from proa.ops.cuda_device import device_ops
from proa.ops.cuda_latent import CudaLatentAttention
from proa.ops.cuda_pages import RunMover
from proa.ops.device_table import DeviceOps
from proa.ops.expanded_latents import ExpandedAttention
from proa.ops.gpu_traits import GpuTraits
from proa.ops.packed import Memory
from proa.ops.sizes import SEGMENT_TOKENS, SEGMENTS_MERGED, SHORT_SEGMENT_TOKENS, segment_rows, warm_rows
from proa.ops.staging import Staging
from proa.ops.table import NextRouter
from proa.plan.kernels import growing_attention, latent_kernels
from proa.plan.plan import GpuPlan, Plan

META = torch.device("meta")
RATIO = 1.1  # between consecutive numbers of prefill rows
_ADDRESS = 1 << 40  # a placeholder, aligned like real addresses; never dereferenced
_NO_COPIES = PrefillRates(1e-9, CpuExpertCost(1.0, 1.0))  # rates by which no expert is streamed, and all
_ALL_COPIES = PrefillRates(1e30, CpuExpertCost(1.0, 1.0))
_PROCESSORS = 128  # number of multiprocessors; compiled variants do not depend on it


def rehearse(plan: Plan, spec: Model, stored: Mapping[str, str], capability: int) -> Iterator[Callable[[], None]]:
    """Calls that each launch the kernels of one kind of step, on a GPU of this compute capability (90: 9.0), in the
    order in which a server needs them. stored: the stored type of each parameter, by our names."""
    return Stage(plan, _reduced(plan, spec, stored), top_k(spec), capability).steps()


@dataclass(frozen=True)
class Shown:
    """The model to rehearse, which may have fewer blocks than the planned one."""

    spec: Model
    stored: Mapping[str, str]
    gpu: GpuPlan


def _reduced(plan: Plan, spec: Model, stored: Mapping[str, str]) -> Shown:
    """The model with fewer blocks: every pair of neighbouring kinds once, since launches depend on the next block."""
    gpu, _ = needed(plan)
    kinds = _kinds(gpu, spec, stored)
    seen: set[object] = set()
    blocks = {0, len(kinds) - 1}
    for i, pair in enumerate(pairwise(kinds)):
        if pair not in seen:
            seen.add(pair)
            blocks |= {i, i + 1}
    numbers = {block: number for number, block in enumerate(sorted(blocks))}
    renamed = {}
    for name, kept in stored.items():
        first, *rest = name.split(".", 2)
        if first != "blocks":
            renamed[name] = kept
        elif int(rest[0]) in numbers:
            renamed[f"blocks.{numbers[int(rest[0])]}.{rest[1]}"] = kept
    layers = [number for number, block in enumerate(gpu.blocks) if block in numbers]
    fewer = msgspec.structs.replace(
        gpu,
        blocks=tuple(numbers[gpu.blocks[i]] for i in layers),
        expert_bytes=tuple(gpu.expert_bytes[i] for i in layers),
        owners=tuple(gpu.owners[i] for i in layers),
    )
    return Shown(replace(spec, blocks=tuple(spec.blocks[i] for i in numbers)), renamed, fewer)


def _kinds(gpu: GpuPlan, spec: Model, stored: Mapping[str, str]) -> list[object]:
    """The kind of each block: blocks of one kind launch the same kernels."""
    layer_of = {block: layer for layer, block in enumerate(gpu.blocks)}
    types: dict[int, set[tuple[str, str]]] = {}
    for name, kept in stored.items():
        first, *rest = name.split(".", 2)
        if first == "blocks":
            types.setdefault(int(rest[0]), set()).add((_of_any_expert(rest[1]), kept))

    def kind(i: int) -> object:
        layer = layer_of.get(i)
        resident = (
            None if layer is None else (bool(gpu.resident[layer]), len(gpu.resident[layer]) == gpu.experts[layer])
        )
        return spec.blocks[i], frozenset(types.get(i, ())), resident

    return [kind(i) for i in range(len(spec.blocks))]


def _of_any_expert(part: str) -> str:
    """The parameter's name with "*" for the expert's number: experts of a layer share their memory, so which of them
    has which type does not matter."""
    words = part.split(".")
    return ".".join("*" if word.isdigit() else word for word in words)


class Stage:
    """The model on the meta device, built as GpuBuild builds it on a GPU."""

    def __init__(self, plan: Plan, of: Shown, chosen: int, capability: int) -> None:
        _, workers = needed(plan)
        self._plan, self._spec, self._gpu, self._limits = plan, of.spec, of.gpu, step_limits(plan)
        self._pool = Pool([()], pin=False)
        staging = Staging(self._pool, 0, pinned=False)
        ram = _NoMemory(self._pool, [None] * len(workers.teams))
        self._hybrid = HybridModel(placement_of(of.gpu), META, ram, staging)
        traits = GpuTraits(capability, _PROCESSORS)
        least = least_rows(plan)
        attention = CudaAttention(traits, least, deterministic=plan.deterministic)
        latent = CudaLatentAttention(traits, least)
        if not plan.deterministic:
            attention.bind(SegmentedAttention(_no_rectangle, traits))
            latent.bind(ExpandedAttention(_no_causal, plan.max_batch_tokens, _no_rectangle))
        ops = CudaOps(META, self._hybrid.new_experts, staging, traits, attention, latent, least)
        self._model = Decoder(of.spec, ops.table())
        for name, target in self._model.parameters():
            if not isinstance(target, Tensor):
                target.expect(of.stored.get(name, "BF16"))
        self._ops = device_ops(META, capability)
        self._spaces = spaces = GpuSpaces(
            self._ops, plan.max_batch_tokens, chosen, fp8=of.gpu.fp8_activations, beside=plan.prompts_may_run_beside,
            least_rows=least,
        )  # fmt: skip
        self._transported: _NoTransport | None = None
        parts = Parts(
            lambda memory, residency, faults: GpuExperts(memory, residency, spaces, faults),
            self._transport,
            lambda: Copiers(_NoCopier(), _NoCopier()),
            CoFetch(None) if of.gpu.co_fetch else None,
            PromptParts(_NoUploads(), of.gpu.ring_bytes, _NO_COPIES, pass_mode(plan)) if of.gpu.ring_bytes else None,
        )
        self._hybrid.bind(plan.max_batch_tokens, chosen, parts, plan.pass_tokens)
        caches = allocate_pool(
            of.spec, plan.num_pages, plan.page_tokens, torch.bfloat16, META, sequences=plan.state_slots,
            kv=KvStorage(DTYPES[plan.kv_dtype]),
        )  # fmt: skip
        self._caches = caches
        self._on = DeviceSteps(self._model, caches, self._limits, _NoAngles(of.spec), META, self._ops)

    def _transport(self, layers: Sequence[Experts], size: JobSize) -> _NoTransport:
        self._transported = _NoTransport(size, self._gpu.doorbell, self._ops)
        return self._transported

    def steps(self) -> Iterator[Callable[[], None]]:
        return map(torch.inference_mode(), self._steps())  # as in GraphExecutor

    def _steps(self) -> Iterator[Callable[[], None]]:
        limits = self._limits
        sizes = limits.decode_sizes(deterministic=self._plan.deterministic)
        if self._gpu.co_fetch:
            yield self._read_in_place
        if self._transported is not None:
            yield from (self._transported.try_out, empty_round(self._transported, self._transported.size, META))
        for bucket in sizes[:WARM_BUCKETS]:
            yield from (partial(self.decode, bucket), partial(self._on.run_head, bucket))
        yield partial(self._on.sampler.warm_up, self._on.logits, self._on.best)
        yield from (partial(self.prompt, rows) for rows in warm_rows(limits.rows))
        for bucket in sizes[WARM_BUCKETS:]:
            yield from (partial(self.decode, bucket), partial(self._on.run_head, bucket))
        yield from (partial(self.prompt, rows) for rows in _dense(limits.rows))
        yield from self._long_pasts()
        yield partial(self._on.run_head, limits.head_rows)
        yield partial(self._on.logprobs.launch_given, self._on.logits, [0], 1)
        if any(cache.page_tensors for layer in self._caches for cache in layer):
            yield self._move_pages

    def _move_pages(self) -> None:
        """Between the caches and the tiers behind the prefix cache."""
        layout = layout_of(self._caches, run_pages(self._plan.page_tokens))
        mover, at = RunMover(layout.rows, layout.starts), torch.empty(1, dtype=torch.int64, device=META)
        run = torch.empty(layout.nbytes, dtype=torch.uint8, device=META)
        mover.gather(at, run)
        mover.scatter(at, run, 0)

    def _read_in_place(self) -> None:
        memory = next(layer.memory for layer in self._hybrid.layers if layer.memory.cpu_computes)
        calls = InPlace(memory, self._spaces)
        calls.read(calls.batches[0])

    def decode(self, bucket: int) -> None:
        self._on.run(self._on.decode_inputs(bucket, 1), bucket)

    def _long_pasts(self) -> Iterator[Callable[[], None]]:
        """Prompts after pasts whose segments are merged in one launch, two, and three."""
        limits, heads = self._limits, {kernel.heads for kernel in growing_attention(self._spec)}
        latent = bool(latent_kernels(self._spec))
        for beside in (False, True) if self._plan.prompts_may_run_beside else (False,):
            found = {at for n in heads for at in long_pasts(limits.rows, limits.context_tokens, n, beside=beside)}
            found |= set(latent_pasts(limits.rows, limits.context_tokens, beside=beside)) if latent else set()
            for past, rows in sorted(found):
                yield partial(self.prompt_after, past, rows, beside=beside)

    def prompt_after(self, past: int, rows: int, *, beside: bool) -> None:
        """beside: decode steps."""
        spans = (Span(range(rows), past, (), past + rows),)
        self._on.run(self._on.inputs, rows, spans, beside_decode=beside)

    def prompt(self, rows: int) -> None:
        self._on.run(self._on.inputs, rows)
        if self._plan.max_itl is None:
            return
        streaming = self._hybrid.streaming
        if streaming is None or streaming.leaves_none:  # steps that are no passes have kernels of their own
            self._parts(rows)
        else:
            self._pass(rows, _NO_COPIES)
            self._pass(rows, _NO_COPIES, PROBED_LAYERS)
        if streaming is not None and (streaming.leaves_none or self._hybrid.passes_in_groups):
            self._pass(rows, _ALL_COPIES)

    def _pass(self, rows: int, rates: PrefillRates, probed_layers: int = 0) -> None:
        """probed_layers: that are divided by their routing."""
        if (streaming := self._hybrid.streaming) is not None:
            streaming.rates, streaming.probed_layers = rates, probed_layers
            streaming.promotions = None  # they launch kernels of torch alone
        self._hybrid.begin_pass(rows, 1)
        self._parts(rows)

    def _parts(self, rows: int) -> None:
        tokens, step = self._on.step(self._on.inputs, rows)
        with self._hybrid.in_parts():
            for _ in self._model.by_blocks(tokens, step):
                pass
        self._hybrid.end_pass()


def long_pasts(
    most_rows: int, context_tokens: int, heads: int, *, beside: bool = False
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The first (past, rows) whose tiles merge their segments in one launch, two and three, with the most rows that fit
    into the context. beside: decode steps."""

    def launches(past: int, rows: int) -> set[int]:
        tiles = tiles_of(rows, past, segment_rows(heads), SEGMENT_TOKENS[-1])
        return {merges(tile.covered, beside=beside) for tile in tiles}

    return _firsts(most_rows, context_tokens, launches)


def latent_pasts(most_rows: int, context_tokens: int, *, beside: bool = False) -> Iterator[tuple[int, int]]:
    """As long_pasts, of prompts whose latent keys and values are expanded."""
    return _firsts(most_rows, context_tokens, lambda past, rows: {merges(past, beside=beside)})


def _firsts(
    most_rows: int, context_tokens: int, launches: Callable[[int, int], set[int]]
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """The first (past, rows) with each number of launches."""
    seen = {0}
    for past in range(0, context_tokens, SEGMENT_TOKENS[-1]):
        rows = min(most_rows, context_tokens - past)
        found = launches(past, rows)
        if found - seen:
            seen |= found
            yield past, rows


def merges(covered: int, *, beside: bool = False) -> int:
    """The number of launches that merge the segments of so many positions, at most 3: more have the kernels of 3.
    beside: decode steps."""
    segments = sum(1 for _ in segments_of(covered, SHORT_SEGMENT_TOKENS if beside else SEGMENT_TOKENS))
    return min(3, -(-segments // SEGMENTS_MERGED))


def _dense(most: int) -> list[int]:
    """Numbers of rows up to `most`, each RATIO times the one before: kernels are chosen by intervals of the number of
    rows, none of which lies between two of these."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, int(sizes[-1] * RATIO))))
    return sizes


def _no_rectangle(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Results in the layout that cuDNN returns."""
    _, heads, rows, _ = q.shape
    out = torch.empty(1, rows, heads, values.shape[3], dtype=q.dtype, device=META)
    return out.transpose(1, 2), torch.empty(1, heads, rows, 1, device=META)


def _no_causal(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Results in the layout that flash-attention returns."""
    rows, heads, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=META), torch.empty(heads, rows, device=META)


class _NoAngles:
    def __init__(self, spec: Model) -> None:
        self._ropes = spec.ropes

    def of(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        def one(rope: Rope) -> Tensor:
            return torch.empty(len(positions), rope.dim // 2, device=META)

        return {rope: (one(rope), one(rope)) for rope in self._ropes}


class _NoMemory(Memory):
    """Hands out placeholder addresses instead of memory."""

    def take(self, sizes_bytes: Sequence[int]) -> list[int]:
        return [_ADDRESS if nbytes else 0 for nbytes in sizes_bytes]


class _NoCopier:
    def start(self, pairs: Pairs) -> Copy:
        raise NotImplementedError("a rehearsal moves no experts")

    def clear(self, memories: Sequence[Tensor]) -> Copy:
        raise NotImplementedError("a rehearsal lends no pages")

    def close(self) -> None:
        pass


class _NoUploads:
    """Uploads that never take place."""

    def start(self, transfers: Sequence[Transfer], after: HostMark | None, owners: object) -> Upload:
        return _NoUpload()

    def mark(self) -> HostMark:
        return HostMark(0.0)

    def fetch(self, ids: Tensor, calm: HostMark | None = None) -> Fetched:
        return HostFetched(np.zeros(ids.numel(), np.int32))

    def close(self) -> None:
        pass


class _NoUpload:
    def join(self) -> None:
        pass

    def done(self) -> bool:
        return False

    def seconds(self) -> float | None:
        return None


class _NoCopies:
    """Copies of a job and its answer that do nothing."""

    def stream(self, device: torch.device) -> int:
        return 0

    def copy_to_host(self, stream: int, to: int, source: int, nbytes: int) -> None:
        pass

    def copy_to_device(self, stream: int, to: int, source: int, nbytes: int) -> None:
        pass

    def before(self, stream: int) -> None:
        pass

    def ring(self, stream: int) -> None:
        pass

    def wait(self, stream: int) -> None:
        pass

    def free(self) -> None:
        pass


class _NoTransport:
    """Launches the GPU's side of a transport, without a CPU that answers."""

    can_foresee = foresees = True

    def __init__(self, size: JobSize, doorbell: str, ops: DeviceOps) -> None:
        """doorbell: the planned way to ring, a key of WAYS or "auto"."""
        self.size = size
        memory = torch.empty(block_layout(size).bytes, dtype=torch.uint8, device=META)
        state = torch.empty(STATE_WORDS + size.most_tokens, dtype=torch.int32, device=META)
        self._by_kernels = ByKernels(memory, size, ops, state)
        copies = ByCopies(memory, size, ops, state, memory, _NoCopies(), _NoCopies())
        self._way: GpuWay = self._by_kernels if WAYS.get(doorbell, Way.NUMBER) is Way.NUMBER else copies

    def try_out(self) -> None:
        if self._way is self._by_kernels:
            self._by_kernels.poll(1, torch.empty(1, dtype=torch.int32, device=META))
        else:
            self._way.try_out()

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        self._way.push(x, ids, weights, up_address, layer)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        self._way.foresee(x, slots, following, cpu, layer)

    def pull(self, out: Tensor) -> None:
        self._way.pull(out)

    def bell(self, layer: int) -> Bell | None:
        return self._way.bell(layer)

    def arm(self) -> None:
        pass

    def disarm(self) -> None:
        pass

    def check(self) -> None:
        pass

    def counters(self) -> Counters:
        return NOTHING_COUNTED

    def probe_us(self, rounds: int = 200) -> float:
        raise NotImplementedError("a rehearsal has no round trip to measure")

    def close(self) -> None:
        pass
