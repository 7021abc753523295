"""All routed experts of a model: made layer by layer, bound to a device and a transport when loaded. Belongs here:
assembling the parts, and their order around each step. Never: decisions, kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proa.hybrid.choices import NONE, Choices
from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers
from proa.hybrid.counting import Counting
from proa.hybrid.deferral import Deferral
from proa.hybrid.faults import Fault, FaultRecords
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.loans import Loans, room_bytes
from proa.hybrid.moves import Moves
from proa.hybrid.pass_state import Asked
from proa.hybrid.promotions import Promotions
from proa.hybrid.ring import Ring
from proa.hybrid.runtime import DeviceExperts, HybridExperts
from proa.hybrid.streaming import Streaming
from proa.hybrid.tables import Tables
from proa.hybrid.transport import Transport
from proa.hybrid.uploads import Uploads
from proa.machine.cost.co_fetch import update_is_due
from proa.machine.cost.prefill import PrefillRates
from proa.models.spec import SILU, Gating, Mlp
from proa.native.doorbell import NOTHING_COUNTED, Counters, JobSize, counted_since
from proa.native.weights import Experts
from proa.ops.faults import LayerFaults
from proa.ops.packed import Memory
from proa.ops.residency import Residency
from proa.ops.staging import Staging

NewDevice = Callable[[LayerMemory, Residency, LayerFaults], DeviceExperts]
NewTransport = Callable[[Sequence[Experts], JobSize], Transport]


@dataclass(frozen=True)
class Placement:
    """owners: for each MoE layer, by its block's number: of each expert the rank whose GPU holds it, or CPU. rank: of
    the device. inclusive: RAM holds a copy of all experts.

    spare: how many experts of each size may move at once; 0: placement is static. counted: count choices even then.
    trace: a file for the counts of each look (trace.py). defers: the transport's doorbell defers pairs of decode steps.
    """

    owners: Mapping[int, tuple[int, ...]]
    inclusive: bool
    spare: int = 0
    counted: bool = False
    trace: Path | None = None
    rank: int = 0
    defers: bool = False


@dataclass(frozen=True)
class PromptParts:
    """What passes of prompts need. ring_bytes: of VRAM; rates: at first, measured later."""

    uploads: Uploads[Any]
    ring_bytes: int
    rates: PrefillRates
    mode: str  # a value of --prefill


@dataclass(frozen=True)
class Parts:
    """The parts that differ between a GPU and a simulated one."""

    experts: NewDevice
    transport: NewTransport
    copiers: Callable[[], Copiers]
    co_fetch: CoFetch | None = None  # None: the GPU does not read experts in RAM
    prompts: PromptParts | None = None  # None: the CPU computes its experts for prompts too


class HybridModel:
    """`new_experts` is what the model's layers are built with."""

    def __init__(self, placement: Placement, device: torch.device, ram: Memory, staging: Staging) -> None:
        self._placement, self._device, self._ram, self._staging = placement, device, ram, staging
        self._deferral = Deferral() if placement.defers else None
        self._made: dict[int, HybridExperts] = {}  # by the block's number
        self.transport: Transport | None = None
        self.moves: Moves | None = None
        self._loans: Loans | None = None
        self.counting: Counting | None = None
        self._faults: FaultRecords | None = None
        self.co_fetch: CoFetch | None = None
        self._co_fetch_paused = False  # by a pass that runs beside decode steps
        self.tables: Tables | None = None
        self.streaming: Streaming | None = None
        self._pass_launch = 0  # the last launch of the last pass
        self._launched = 0  # steps, and how many of those have ended
        self._ended = 0
        self._aside = False  # within aside(): steps leave nothing behind
        self._uncounted = NOTHING_COUNTED  # the doorbell's counts of such steps

    def new_experts(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> HybridExperts:
        """See NewExperts. Raises ValueError unless the placement has this block, with as many experts, made once."""
        placement, of = self._placement, Mlp(hidden, width, bias, gating)
        owners = placement.owners.get(block, ())
        if len(owners) != experts:
            raise ValueError(f"block {block} has {experts} experts, but the placement has {len(owners)} there")
        if block in self._made:
            raise ValueError(f"the experts of block {block} were made before")
        memory = LayerMemory(
            of, owners, placement.inclusive, self._device, self._ram, self._staging, placement.rank
        )  # fmt: skip
        self._made[block] = HybridExperts(memory)
        return self._made[block]

    @property
    def layers(self) -> list[HybridExperts]:
        """The MoE layers, in the model's order."""
        return [self._made[block] for block in sorted(self._made)]

    def bind(self, most_tokens: int, top_k: int, parts: Parts, pass_tokens: int = 0) -> None:
        """Bind the layers, after loading. Jobs have up to `most_tokens` rows with `top_k` experts each; steps in parts
        have up to pass_tokens rows, if that is more."""
        layers = self.layers
        memories = [layer.memory for layer in layers]
        shared = [memory for memory in memories if memory.cpu_computes]
        if shared:
            stacks = [memory.stacks for memory in shared]
            size = JobSize(most_tokens, top_k, shared[0].hidden)
            self.transport = parts.transport([stack.experts() for stack in stacks if stack is not None], size)
        for memory in memories:
            memory.fill_slots()
        spare, trace = self._placement.spare, self._placement.trace
        counted = spare > 0 or self._placement.counted or trace is not None
        self.co_fetch = parts.co_fetch
        self.tables = Tables(memories, self._device, counted=counted, in_place=self.co_fetch is not None)
        if self.co_fetch is not None:
            self.tables.share(self.co_fetch.shares)
        defers, most_in_parts = self._placement.defers, max(most_tokens, pass_tokens)
        self._faults = FaultRecords(most_tokens, most_in_parts, top_k, self._device, defers=defers)
        called = 0  # layers of the doorbell so far
        for number, (layer, residency) in enumerate(zip(layers, self.tables.residency, strict=True)):
            transport = self.transport if layer.memory.cpu_computes else None
            bell = None if transport is None else transport.bell(called)
            device = parts.experts(layer.memory, replace(residency, bell=bell), self._faults.of(number))
            layer.bind(device, transport, called, self._deferral)
            called += transport is not None
        if parts.prompts is not None:
            self._bind_passes(parts, parts.prompts, top_k)
        if not counted:
            return
        copiers = parts.copiers()
        nbytes = [memory.shape.up.matrix_bytes + memory.shape.down.matrix_bytes for memory in memories]
        self.counting = Counting(self.tables, top_k, nbytes, copiers.counts, trace)
        if spare:
            self.moves = Moves(memories, self.tables, spare, self._placement.inclusive, copiers.weights)
            if self.streaming is not None and parts.prompts is not None:
                ring, uploads = self.streaming.ring, parts.prompts.uploads
                self.streaming.promotions = Promotions(self.moves, ring, self.counting, uploads, top_k)

    def _bind_passes(self, parts: Parts, prompts: PromptParts, top_k: int) -> None:
        memories, tables, faults = [layer.memory for layer in self.layers], self.tables, self._faults
        if tables is None or faults is None:
            raise ValueError("passes need tables and fault records")
        ring = Ring(memories, prompts.ring_bytes, self._device)
        asked = Asked(prompts.mode, top_k)
        self.streaming = streaming = Streaming(memories, tables, ring, prompts.uploads, prompts.rates, asked)
        streaming.jobs = None if self.transport is None else self.transport.counters
        for number, layer in enumerate(self.layers):
            if layer.memory.cpu_computes and self.transport is not None:
                sets = ring.groups(number, len(layer.memory.in_ram))
                tables_of = [residency[number] for residency in streaming.overlay.residency[:sets]]
                bell = None if streaming.leaves_none else self.transport.bell(layer.layer)
                whole = replace(tables_of[0], bell=bell)
                one, *groups = (parts.experts(layer.memory, of, faults.of(number)) for of in (whole, *tables_of))
                layer.stream(one, groups, streaming)

    @property
    def able(self) -> Choices:
        """The choices that this model has."""
        bell = self.transport
        return NONE if bell is None else Choices(self.co_fetch is not None, bell.can_foresee)

    @property
    def choices(self) -> Choices:
        bell = self.transport
        return NONE if bell is None else Choices(self.co_fetch is not None and self.co_fetch.on, bell.foresees)

    def choose(self, choices: Choices) -> None:
        """Launch the next steps with these choices. No step may be in flight. Raises ValueError for one that the model
        does not have."""
        if choices != choices.within(self.able):
            raise ValueError(f"the model has no choice of {choices}: possible is {self.able}")
        if self.transport is not None:
            self.transport.foresees = choices.read_ahead
        if self.co_fetch is not None and self.tables is not None:
            self.co_fetch.on = choices.co_fetch
            self.tables.share(self.co_fetch.in_force)

    @property
    def variant(self) -> int:
        """See Session: a graph contains the launches of hints, but reads the shares of co-fetch from a table."""
        return int(self.choices.read_ahead)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the context steps leave nothing behind: no expert moves and no choice is counted, and at its end
        counters, and what co-fetch knows of the CPU, are as before. At both ends no step may be in flight, and no fetch
        of counts under way: use it before the first request."""
        if self.tables is None:
            raise ValueError("steps can be computed after bind()")
        counts, before = self.tables.counts.to("cpu", copy=True), self._rung()
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            self.tables.counts.copy_(counts)  # synchronous: steps run on another stream
            now = self._rung()
            self._uncounted = counted_since(counted_since(self._uncounted, before), now)
            if self.co_fetch is not None:
                self.co_fetch.forget(now)
                self.tables.share(self.co_fetch.in_force)

    def _rung(self) -> Counters:
        """The doorbell's counters."""
        return NOTHING_COUNTED if self.transport is None else self.transport.counters()

    @property
    def has_experts(self) -> bool:
        """Whether some of the model's experts lie in RAM."""
        return self.transport is not None

    @property
    def passes_in_groups(self) -> bool:
        """Whether a bank of the ring is smaller than a layer's experts, so that a pass may have groups of them."""
        return self.streaming is not None and len(self.streaming.overlay.residency) > 1

    def begin_pass(self, tokens: int, chunks: int, beside: float | None = None) -> None:
        """Begin a step in parts of `tokens` tokens, of which each layer is launched in `chunks` chunks. At most one at
        a time. beside: see Session."""
        if self.streaming is None:
            return
        heat = None if self.moves is None else self.moves.heat.heat
        self.streaming.begin(tokens, chunks, heat, self.counters(), promotes=not self._aside, beside=beside)
        if self.streaming.alone:
            self._pause_co_fetch()

    def _pause_co_fetch(self) -> None:
        """Leave PCIe to the copies of a pass that runs beside decode steps: the CPU computes all experts in RAM."""
        if self.co_fetch is not None and self.co_fetch.on and self.tables is not None:
            self._co_fetch_paused, self.co_fetch.on = True, False
            self.tables.share(self.co_fetch.in_force)

    def _resume_co_fetch(self) -> None:
        if self._co_fetch_paused and self.co_fetch is not None and self.tables is not None:
            self._co_fetch_paused, self.co_fetch.on = False, True
            self.tables.share(self.co_fetch.in_force)

    @property
    def pass_is_alone(self) -> bool:
        """See Session."""
        return self.streaming is not None and self.streaming.alone

    @property
    def pass_is_regular(self) -> bool:
        """See Session."""
        return self.streaming is None or self.streaming.regular

    def cutting(self, cut: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """See Session."""
        return nullcontext() if self.streaming is None else self.streaming.cutting(cut)

    @property
    def pass_waits(self) -> bool:
        """See Session."""
        return self.streaming is not None and self.streaming.waits

    def pause_pass(self) -> None:
        """See Session."""
        if self.streaming is not None:
            self.streaming.collect()

    def end_pass(self) -> float:
        """The step in parts was launched whole, or was given up after all launches ended. Returns the fraction of the
        experts in RAM that were copied to the GPU."""
        if self.streaming is None:
            return 0.0
        streamed = self.streaming.end()
        self._resume_co_fetch()
        self._pass_launch = self._launched
        if self._ended == self._launched:
            self.streaming.measure(self.counters())
        return streamed

    @property
    def _in_pass(self) -> bool:
        return self.streaming is not None and self.streaming.under_way

    def begin(self) -> None:
        """Prepare the launch of a step on the current stream. Other steps may be in flight: each needs its own `end`,
        in launch order."""
        self._launched += 1
        self._update(self._launched)
        if self.tables is not None:
            self._balance(self.tables)
            self.tables.publish()
        if self.transport is not None:
            self.transport.arm()

    def _update(self, step: int) -> None:
        """Update tables before launch number `step`. The tables of a pass stay as they are."""
        if self.moves is not None and not (self._in_pass or self._aside):
            self.moves.before(step, self._ended)
            if self._loans is not None:
                self._loans.before(step, self._ended)

    # ---- lent pages (engine/scheduling/lending.py calls)

    @property
    def room_bytes(self) -> int:
        """Bytes of device memory that hold any expert."""
        return room_bytes([layer.memory for layer in self.layers])

    def may_lend(self, rooms: Sequence[Sequence[Tensor]]) -> None:
        """rooms: of each lot of KV pages, uint8 [room_bytes]. Raises ValueError unless experts move and RAM has all."""
        if self.moves is None:
            raise ValueError("KV pages can be lent only where experts move")
        self._loans = Loans(self.moves, rooms, self._placement.spare)

    def lend(self, lot: int) -> None:
        """Use the lot's pages, which stay free until it returns."""
        self._lent.lend(lot, self._launched)

    def take_back(self, lot: int) -> None:
        """Give up a lent lot: it returns once no launch reads its experts."""
        self._lent.take_back(lot)

    def returned(self) -> list[int]:
        """Continue the loans, between launches. Returns the lots whose pages may be used again, since the last call."""
        self._update(self._launched + 1)
        if self._ended == self._launched and not (self._in_pass or self._aside):
            self._lent.meanwhile()
        return self._lent.returned()

    @property
    def rooms_wanted(self) -> int:
        """Rooms that experts in RAM could fill, beyond those that are lent."""
        return self._lent.wanted

    @property
    def filling(self) -> bool:
        """Whether experts are being copied to lent lots, or soon will be, also while nothing is launched."""
        return self._lent.busy

    @property
    def _lent(self) -> Loans:
        if self._loans is None:
            raise ValueError("no pages can be lent before may_lend()")
        return self._loans

    def _balance(self, tables: Tables) -> None:
        if self.co_fetch is None or self.transport is None or not update_is_due(self._launched, self._ended):
            return
        share = self.co_fetch.update(self.transport.counters())
        if share is not None:
            tables.share(share)

    def launched(self) -> None:
        """After a launch, while the device computes: read counts and start moves. In a pass only after its last layers:
        no move starts earlier, and reading the counts of all layers after each one took 0.7 of the 2.2 ms that the host
        needs for a layer (H200, 24 layers)."""
        if self._aside or (self.streaming is not None and self.streaming.midway):
            return
        seen = None if self.counting is None else self.counting.look()
        if self.moves is not None:
            self.moves.meanwhile(seen, may_start=not self._in_pass)
        if self._loans is not None and not self._in_pass:
            self._loans.meanwhile()

    def end(self) -> None:
        """The device has finished the oldest step in flight. Raises what failed on the CPU."""
        self._ended += 1
        if self.transport is not None:
            self.transport.disarm()
            self.transport.check()
        if self.streaming is not None and self._ended == self._pass_launch:
            self.streaming.measure(self.counters())

    def counters(self) -> Counters:
        """The doorbell's counters since the start, with hits and moved bytes if choices are counted."""
        cpu = self._rung() if self._uncounted is NOTHING_COUNTED else counted_since(self._uncounted, self._rung())
        if self.streaming is not None:
            cpu = self.streaming.counted(cpu)
        if self.counting is None:
            return cpu
        moved_bytes = 0 if self.moves is None else self.moves.moved.nbytes
        lent = (0, 0) if self._loans is None else (self._loans.num_slots, self._loans.nbytes)
        return replace(
            cpu, **vars(self.counting.tally), moved_bytes=moved_bytes, lent_slots=lent[0], lent_bytes=lent[1]
        )

    def close(self) -> None:
        """Finish all copies. No step may be under way."""
        if self.streaming is not None:
            self.streaming.close()
        if self.moves is not None:
            self.moves.close()
        if self.counting is not None:
            self.counting.close()

    def faults(self, rows: int) -> list[Fault]:
        """Return non-finite rows among the first `rows` of the steps since the last call, and where each began."""
        return [] if self._faults is None else self._faults.take(rows)

    def decoding(self) -> AbstractContextManager[None]:
        """Context in which launches are those of whole decode steps, of which pairs may be deferred."""
        return nullcontext() if self._deferral is None else self._deferral.decoding()

    @contextmanager
    def in_parts(self, first_row: int = 0) -> Iterator[None]:
        """Within the context, launches and `faults` belong to a step in parts, launches to its rows from `first_row`
        on: other steps run between its parts."""
        with ExitStack() as stack:
            if self._faults is not None:
                stack.enter_context(self._faults.of_parts(first_row))
            if self.streaming is not None:
                stack.enter_context(self.streaming.launching())
            yield
