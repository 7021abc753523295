"""llama.cpp's expert kernels (of llama-cpp-python) beside Proa. See README.md; the options are those of `proa bench
kernels`.

One graph a layer, as llama.cpp builds it: mul_mat_id of up and gate, SwiGLU, mul_mat_id of down, weighting, sum. Types
other than bf16 and fp16 round activations to 8 bits. Q4_0 is rearranged for the CPU when it is loaded, as in llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from beside import Call, Dense, Loaded, Peer, bf16_values, compare, main, options_of
from ggml_calls import F32, GRAPH_NODES, I32, Ggml

from proa.bench.kernel_cases import Shape
from proa.errors import UsageError


@dataclass(frozen=True)
class Type:
    """ggml's number of a type, bits of a weight with scales."""

    name: str
    number: int
    bits: float
    repacked: bool = False


TYPES = {
    "bf16": Type("BF16", 30, 16),
    "fp16": Type("F16", 1, 16),
    "int8-g32": Type("Q8_0", 8, 8.5),
    "int4-g32": Type("Q4_0", 2, 4.5, repacked=True),
    "uint4-g32": Type("Q4_1", 3, 5),
    "mxfp4": Type("MXFP4", 39, 4.25),
    "q4_k": Type("Q4_K", 12, 4.5),
    "q6_k": Type("Q6_K", 14, 6.5625),
}


def library_folder() -> Path:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise UsageError(
            "llama-cpp-python is not installed here.", "See benchmarks/peers/README.md for how to install it."
        )
    return Path(found.origin).parent / "lib"


def run(argv: Sequence[str]) -> None:
    options = options_of(argv, "run_llama_cpp.py", list(TYPES))
    folder = library_folder()

    def make_peer(threads: int) -> Peer:
        ggml = Ggml(folder, threads)
        formats = {name: kind.name for name, kind in TYPES.items()}
        version = importlib.metadata.version("llama-cpp-python")
        return Peer("llama.cpp of llama-cpp-python", version, threads, formats, partial(_load, ggml))

    compare(make_peer, options)


@dataclass(frozen=True)
class Layer:
    """Tensors [experts, rows, columns]."""

    gate: int
    up: int
    down: int


class Layers:
    """The weights of several layers, and the graphs of the cell at hand."""

    def __init__(self, ggml: Ggml, kind: Type, shape: Shape, count: int) -> None:
        self._ggml, self._shape = ggml, shape
        self._context, self._cell = ggml.context(), Cell(ggml)
        self._layers = [self._describe(kind.number) for _ in range(count)]
        memory = ggml.repacking_memory() if kind.repacked else ggml.plain_memory
        self._buffer = ggml.backend_alloc_ctx_tensors_from_buft(self._context, memory)

    def fill(self, name: str, blocks: npt.NDArray[Any]) -> None:
        for layer in self._layers:
            self._ggml.put(vars(layer)[name], blocks)

    def prepare(self, calls: Sequence[Call]) -> tuple[Callable[[int], None], Callable[[], npt.NDArray[np.float32]]]:
        self._cell.close()
        self._cell = cell = Cell(self._ggml)
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

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._contexts: list[int] = []
        self._memory = ggml.gallocr_new(ggml.plain_memory)
        self._inputs: int | None = None
        self._graphs: list[tuple[int, int]] = []  # with the tensor of its result
        self._calls: Sequence[Call] = ()

    def build(self, layers: Sequence[Layer], shape: Shape, calls: Sequence[Call]) -> None:
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
        """Of the call before."""
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

    def _graph(self, layer: Layer, x: int, shape: Shape, tokens: int) -> tuple[int, int]:
        ggml, context, row_bytes = self._ggml, self._new_context(), shape.hidden * 4
        up, gate = (ggml.mul_mat_id(context, one, x, self._ids) for one in (layer.up, layer.gate))
        each = ggml.mul_mat_id(context, layer.down, ggml.swiglu_split(context, gate, up), self._ids)
        each = ggml.mul(context, each, self._weights)
        total = None
        for i in range(shape.top_k):
            part = ggml.view_2d(context, each, shape.hidden, tokens, shape.top_k * row_bytes, i * row_bytes)
            total = part if total is None else ggml.add(context, total, part)
        graph = ggml.new_graph_custom(context, GRAPH_NODES, False)
        ggml.build_forward_expand(graph, total)
        ggml.gallocr_alloc_graph(self._memory, graph)
        return int(graph), int(total or 0)


def _load(ggml: Ggml, of: str, shape: Shape, count: int, dense: Dense, most_tokens: int) -> Loaded:
    kind = TYPES[of]
    layers = Layers(ggml, kind, shape, count)
    for name, bits in (("gate", dense.gate), ("up", dense.up), ("down", dense.down)):
        if of == "bf16":
            layers.fill(name, bits)
        else:
            layers.fill(name, np.concatenate([ggml.quantized(kind.number, bf16_values(one)) for one in bits]))
    return Loaded(layers.prepare, kind.bits, layers.close)


if __name__ == "__main__":
    main(run)
