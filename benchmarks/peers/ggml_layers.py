"""One layer's experts as graphs of ggml, one a layer: gate and up, mul_mat_id of down, weighting, sum. And the run of a
program that brings ggml beside Proa. Never: what such a program does otherwise than others (run_*.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from beside import Call, Dense, Loaded, Peer, bf16_values, compare, options_of
from ggml_calls import F32, GRAPH_NODES, I32, Ggml, Signatures

from proa.bench.kernel_cases import ExpertShape
from proa.errors import UsageError


@dataclass(frozen=True)
class Layer:
    """Tensors [experts, rows, columns]."""

    gate: int
    up: int
    down: int


# (context, layer, rows, ids): the tensor of SwiGLU of gate and up.
Gated = Callable[[int, Layer, int, int], int]


@dataclass(frozen=True)
class Type:
    """ggml's number of a type, bits of a weight with scales, and whether ggml rearranges it for the CPU when loaded."""

    name: str
    number: int
    bits: float
    repacked: bool = False


@dataclass(frozen=True)
class Program:
    """One that brings ggml: its package with `libraries` in lib/, as pip knows it, the functions that only it has, its
    types by Proa's name of the format, how it makes gate and up, and how bits of bfloat16 [rows, columns] lie."""

    name: str
    package: str
    distribution: str
    libraries: Sequence[str]
    functions: Signatures
    types: Mapping[str, Type]
    gated: Callable[[Ggml, int, Layer, int, int], int]
    bf16: Callable[[Ggml, npt.NDArray[np.uint16]], npt.NDArray[np.uint16]]


def run_beside(program: Program, script: str, argv: Sequence[str]) -> None:
    """Raises UsageError where it is not installed."""
    options = options_of(argv, script, list(program.types))
    found = importlib.util.find_spec(program.package)
    if found is None or found.origin is None:
        raise UsageError(
            f"{program.distribution} is not installed here.", "See benchmarks/peers/README.md for how to install it."
        )
    folder = Path(found.origin).parent / "lib"

    def make_peer(threads: int) -> Peer:
        ggml = Ggml([folder / f"lib{name}.so" for name in program.libraries], threads, program.functions)
        formats = {name: kind.name for name, kind in program.types.items()}
        version = importlib.metadata.version(program.distribution)
        name = f"{program.name} of {program.distribution}"
        return Peer(name, version, threads, formats, partial(_load, program, ggml))

    compare(make_peer, options)


def _load(
    program: Program, ggml: Ggml, of: str, shape: ExpertShape, count: int, dense: Dense, most_tokens: int
) -> Loaded:
    kind = program.types[of]
    memory = ggml.repacking_memory() if kind.repacked else ggml.plain_memory
    layers = Layers(ggml, partial(program.gated, ggml), shape, count, kind.number, memory)
    for name, bits in (("gate", dense.gate), ("up", dense.up), ("down", dense.down)):
        if of == "bf16":
            layers.fill(name, np.concatenate([program.bf16(ggml, one) for one in bits]))
        else:
            layers.fill(name, np.concatenate([ggml.quantized(kind.number, bf16_values(one)) for one in bits]))
    return Loaded(layers.prepare, kind.bits, layers.close)


class Layers:
    """The weights of several layers, and the graphs of the cell at hand."""

    def __init__(self, ggml: Ggml, gated: Gated, shape: ExpertShape, count: int, kind: int, memory: int) -> None:
        self._ggml, self._gated, self._shape = ggml, gated, shape
        self._context, self._cell = ggml.context(), Cell(ggml, gated)
        self._layers = [self._describe(kind) for _ in range(count)]
        self._buffer = ggml.backend_alloc_ctx_tensors_from_buft(self._context, memory)

    def fill(self, name: str, blocks: npt.NDArray[Any]) -> None:
        for layer in self._layers:
            self._ggml.put(vars(layer)[name], blocks)

    def prepare(self, calls: Sequence[Call]) -> tuple[Callable[[int], None], Callable[[], npt.NDArray[np.float32]]]:
        self._cell.close()
        self._cell = cell = Cell(self._ggml, self._gated)
        cell.build(self._layers, self._shape, calls)
        return cell.call, cell.result

    def close(self) -> None:
        self._cell.close()
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)

    def _describe(self, kind: int) -> Layer:
        hidden, width, experts = self._shape.hidden, self._shape.width, self._shape.experts

        def tensor(rows: int, columns: int) -> int:
            return int(self._ggml.new_tensor_3d(self._context, kind, columns, rows, experts))

        return Layer(tensor(width, hidden), tensor(width, hidden), tensor(hidden, width))


class Cell:
    """One graph a layer for one number of tokens. They run one after the other, in the same memory."""

    def __init__(self, ggml: Ggml, gated: Gated) -> None:
        self._ggml, self._gated = ggml, gated
        self._contexts: list[int] = []
        self._memory = ggml.gallocr_new(ggml.plain_memory)
        self._inputs: int | None = None
        self._graphs: list[tuple[int, int]] = []  # with the tensor of its result
        self._calls: Sequence[Call] = ()

    def build(self, layers: Sequence[Layer], shape: ExpertShape, calls: Sequence[Call]) -> None:
        ggml, context, tokens = self._ggml, self._new_context(), len(calls[0].x)
        x = ggml.new_tensor_3d(context, F32, shape.hidden, 1, tokens)
        self._ids = ggml.new_tensor_2d(context, I32, shape.top_k, tokens)
        self._weights = ggml.new_tensor_3d(context, F32, 1, shape.top_k, tokens)
        self._inputs = ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.plain_memory)
        ggml.put(x, bf16_values(calls[0].x))
        self._calls, self._rows = calls, (tokens, shape.hidden)
        self._graphs = [self._graph(layer, x, shape, tokens) for layer in layers]

    def call(self, number: int) -> None:
        one = self._calls[number % len(self._calls)]
        self._ggml.put(self._ids, one.ids)
        self._ggml.put(self._weights, one.weights)
        self._ggml.backend_graph_compute(self._ggml.backend, self._graphs[number % len(self._graphs)][0])

    def result(self) -> npt.NDArray[np.float32]:
        """The result of the last call."""
        rows = np.empty(self._rows, np.float32)
        self._ggml.backend_tensor_get(self._graphs[0][1], rows.ctypes.data, 0, rows.nbytes)
        return rows

    def close(self) -> None:
        self._ggml.gallocr_free(self._memory)
        if self._inputs is not None:
            self._ggml.backend_buffer_free(self._inputs)
        for context in self._contexts:
            self._ggml.free(context)

    def _new_context(self) -> int:
        self._contexts.append(self._ggml.context())
        return self._contexts[-1]

    def _graph(self, layer: Layer, x: int, shape: ExpertShape, tokens: int) -> tuple[int, int]:
        ggml, context, row_bytes = self._ggml, self._new_context(), shape.hidden * 4
        each = ggml.mul_mat_id(context, layer.down, self._gated(context, layer, x, self._ids), self._ids)
        each = ggml.mul(context, each, self._weights)
        total = None
        for i in range(shape.top_k):
            part = ggml.view_2d(context, each, shape.hidden, tokens, shape.top_k * row_bytes, i * row_bytes)
            total = part if total is None else ggml.add(context, total, part)
        graph = ggml.new_graph_custom(context, GRAPH_NODES, False)
        ggml.build_forward_expand(graph, total)
        ggml.gallocr_alloc_graph(self._memory, graph)
        return int(graph), int(total or 0)
