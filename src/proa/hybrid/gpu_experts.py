"""The GPU's experts of a layer, packed, read by their addresses. Never: deciding which experts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.read_together import Reads
from proa.ops.added import Added
from proa.ops.bell_block import Bell
from proa.ops.device_table import DeviceOps, ExpertSpace
from proa.ops.faults import LayerFaults
from proa.ops.residency import Located, Residency
from proa.ops.sizes import FEW_ROWS
from proa.ops.table import Unsummed

PROBED_AT_ONCE = 4  # experts per call: about what a step of one token reads over PCIe
READS_AT_LEAST = 64  # calls per graph: launched singly, small experts would be bound by launches, not by PCIe


class GpuSpaces:
    """Workspaces between kernels, shared by layers of one shape, whose calls run in order. fp8, least_rows: see
    NewExpertSpace. beside: calls with fewer than FEW_ROWS rows have workspaces of their own, and may run beside the
    others."""

    def __init__(
        self, ops: DeviceOps, tokens: int, top_k: int, *, fp8: bool = False, beside: bool = False, least_rows: int = 1
    ) -> None:  # fmt: skip
        self.ops, self._beside, self._least_rows = ops, beside, least_rows
        self._tokens, self._top_k, self._fp8 = tokens, top_k, fp8
        self._made: dict[object, ExpertSpace] = {}

    def of(self, memory: LayerMemory, *, few: bool = False) -> ExpertSpace:
        """few: for calls with fewer than FEW_ROWS rows."""
        tokens = min(self._tokens, FEW_ROWS - 1) if few and self._beside else self._tokens
        device, of = memory.slots.up.device, memory.shape
        rounded = (of.up_form, of.down_form, of.width) if self._fp8 else ()
        key = (memory.hidden, of.down.padded_columns, memory.experts, device, rounded, tokens)
        if key not in self._made:
            self._made[key] = self.ops.expert_space(
                tokens, self._top_k, memory.experts, of, device, fp8=self._fp8, least_rows=self._least_rows
            )
        return self._made[key]


class InPlace:
    """Calls by which the GPU reads a layer's experts in RAM, `at_once` per call. The RAM must be registered."""

    def __init__(self, memory: LayerMemory, spaces: GpuSpaces, at_once: int = PROBED_AT_ONCE) -> None:
        space = spaces.of(memory)
        device, self.shape, self._space, self._ops = memory.slots.up.device, memory.shape, space, spaces.ops
        total, self.count = len(memory.in_ram), min(at_once, len(memory.in_ram), len(space.partial))
        firsts = range(0, total - self.count + 1, self.count)
        self._in_pieces = memory.in_pieces
        self.batches = [_in_ram(memory, first, self.count, device) for first in firsts]
        self._x = torch.zeros(1, memory.shape.hidden, dtype=torch.bfloat16, device=device)

    def read(self, at: Located) -> None:
        """Launch the call for one of `batches`."""
        self._ops.experts(self._x, at, self.shape, self._space, in_pieces=self._in_pieces)


class ReadInPlace:
    """Measures how fast the GPU reads a layer's experts in RAM, with all calls in one graph, as in a decode step.
    Implements GpuReader."""

    def __init__(self, memory: LayerMemory, spaces: GpuSpaces, at_once: int = PROBED_AT_ONCE) -> None:
        device = memory.slots.up.device
        self._calls = InPlace(memory, spaces, at_once)
        self._times = -(-READS_AT_LEAST // len(self._calls.batches))
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = self._captured(device)

    def _captured(self, device: torch.device) -> torch.cuda.CUDAGraph:
        graph, calls = torch.cuda.CUDAGraph(), self._calls
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(device))  # where the addresses were written
            calls.read(calls.batches[0])  # compiles and loads the kernels
            self._stream.synchronize()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                for at in calls.batches * self._times:
                    calls.read(at)
        return graph

    @property
    def nbytes(self) -> int:
        """Bytes of weights per replay of the graph."""
        calls, of = self._calls, self._calls.shape
        return self._times * len(calls.batches) * calls.count * (of.up.matrix_bytes + of.down.matrix_bytes)

    def read(self, rounds: int = 1, meanwhile: Callable[[], int] | None = None) -> Reads:
        """Replay the graph `rounds` times."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began_s, beside = time.perf_counter(), 0
        with torch.cuda.stream(self._stream):
            begin.record(self._stream)
            for _ in range(rounds):
                self._graph.replay()
            end.record(self._stream)
        launched_s = time.perf_counter()
        while meanwhile is not None and not end.query():  # type: ignore[no-untyped-call]
            beside += meanwhile()
        beside_s = time.perf_counter() - launched_s
        end.synchronize()
        took_s = time.perf_counter() - began_s
        seconds: float = begin.elapsed_time(end) * 1e-3
        cpu_bytes_per_s = beside / beside_s if beside else 0.0
        return Reads(rounds * self.nbytes / seconds, cpu_bytes_per_s, beside_s / took_s if beside else 0.0)


def _in_ram(memory: LayerMemory, first: int, count: int, device: torch.device) -> Located:
    """Locate `count` experts in RAM, from number `first` of `memory.in_ram` on, as the choice of one token."""
    places = [memory.addresses(number) for number in range(first, first + count)]
    up, down = (torch.tensor([at], dtype=torch.int64, device=device) for at in zip(*places, strict=True))
    ids = torch.arange(count, dtype=torch.int32).to(device)[None]
    return Located(ids, up, down, torch.full(ids.shape, -1, dtype=torch.int32, device=device))


class GpuExperts:
    """Implements DeviceExperts."""

    def __init__(self, memory: LayerMemory, residency: Residency, spaces: GpuSpaces, faults: LayerFaults) -> None:
        self._ops, self._space, self._few = spaces.ops, spaces.of(memory), spaces.of(memory, few=True)
        self._shape, self.residency, self._faults = memory.shape, residency, faults
        self._biases = memory.biases
        self._in_pieces = residency.in_place is not None and residency.in_place.in_pieces

    def locate(self, ids: Tensor) -> Located:
        return self._ops.locate(ids, self.residency)

    def _space_of(self, x: Tensor) -> ExpertSpace:
        return self._few if len(x) < FEW_ROWS else self._space

    def start(self, x: Tensor, at: Located, weights: Tensor) -> Tensor | None:
        space = self._space_of(x)
        self._ops.experts(x, at, self._shape, space, self._biases, in_pieces=self._in_pieces)
        return space.partial

    def waits(self, x: Tensor) -> Bell | None:
        return self.residency.bell if self._ops.sums_beside_bell(*x.shape) else None

    def add(self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, total: Tensor | None) -> Tensor:
        return self._ops.add_experts(self._space_of(x).partial, weights, at, total, self._faults, x)

    def finish(
        self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, added: Added
    ) -> Unsummed:  # fmt: skip
        return self._ops.sum_experts(self._space_of(x).partial, weights, at, added, self._faults, x)
