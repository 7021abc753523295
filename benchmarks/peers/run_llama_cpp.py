"""llama.cpp's expert kernels (of llama-cpp-python) beside Proa. See README.md; the options are those of `proa bench
kernels`.

One graph a layer, as llama.cpp builds it: mul_mat_id of up and gate, SwiGLU, mul_mat_id of down, weighting, sum. Types
other than bf16 and fp16 round activations to 8 bits. Q4_0 is rearranged for the CPU when it is loaded, as in llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from beside import Dense, Loaded, Peer, bf16_values, compare, main, options_of
from ggml_calls import LLAMA_CPP, Ggml
from ggml_layers import Layer, Layers

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
        ggml = Ggml([folder / f"lib{name}.so" for name in ("ggml-base", "ggml-cpu", "ggml")], threads, LLAMA_CPP)
        formats = {name: kind.name for name, kind in TYPES.items()}
        version = importlib.metadata.version("llama-cpp-python")
        return Peer("llama.cpp of llama-cpp-python", version, threads, formats, partial(_load, ggml))

    compare(make_peer, options)


def _load(ggml: Ggml, of: str, shape: Shape, count: int, dense: Dense, most_tokens: int) -> Loaded:
    kind = TYPES[of]
    memory = ggml.repacking_memory() if kind.repacked else ggml.plain_memory

    def gated(context: int, layer: Layer, x: int, ids: int) -> int:
        up, gate = (ggml.mul_mat_id(context, one, x, ids) for one in (layer.up, layer.gate))
        return int(ggml.swiglu_split(context, gate, up))

    layers = Layers(ggml, gated, shape, count, kind.number, memory)
    for name, bits in (("gate", dense.gate), ("up", dense.up), ("down", dense.down)):
        if of == "bf16":
            layers.fill(name, bits)
        else:
            layers.fill(name, np.concatenate([ggml.quantized(kind.number, bf16_values(one)) for one in bits]))
    return Loaded(layers.prepare, kind.bits, layers.close)


if __name__ == "__main__":
    main(run)
