"""ik_llama.cpp's expert kernels (of ik-llama-cpp-python) beside Proa. See README.md; the options are those of `proa bench
kernels`.

As ik_llama.cpp computes a layer when it rearranges weights for the CPU (`-rtr`): gate, up and SwiGLU as one operation,
mul_mat_id of down, weighting, sum. Types other than bf16 round activations to 8 bits.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from beside import Dense, Loaded, Peer, bf16_values, compare, main, options_of
from ggml_calls import IK_LLAMA, Ggml
from ggml_layers import Layer, Layers

from proa.bench.kernel_cases import Shape
from proa.errors import UsageError

_SILU = 10  # ggml_unary_op


@dataclass(frozen=True)
class Type:
    """ggml's number of a type, bits of a weight with scales."""

    name: str
    number: int
    bits: float


TYPES = {
    "bf16": Type("BF16_R16", 230, 16),
    "int8-g32": Type("Q8_0_R8", 208, 8.5),
    "int4-g32": Type("Q4_0_R8", 202, 4.5),
    "q4_k": Type("Q4_K_R4", 212, 4.5),
    "q6_k": Type("Q6_K_R4", 214, 6.5625),
}


def library() -> Path:
    found = importlib.util.find_spec("ik_llama_cpp")
    if found is None or found.origin is None:
        raise UsageError(
            "ik-llama-cpp-python is not installed here.", "See benchmarks/peers/README.md for how to install it."
        )
    return Path(found.origin).parent / "lib" / "libggml.so"


def run(argv: Sequence[str]) -> None:
    options = options_of(argv, "run_ik_llama.py", list(TYPES))
    path = library()

    def make_peer(threads: int) -> Peer:
        ggml = Ggml([path], threads, IK_LLAMA)
        formats = {name: kind.name for name, kind in TYPES.items()}
        version = importlib.metadata.version("ik-llama-cpp-python")
        return Peer("ik_llama.cpp of ik-llama-cpp-python", version, threads, formats, partial(_load, ggml))

    compare(make_peer, options)


def _load(ggml: Ggml, of: str, shape: Shape, count: int, dense: Dense, most_tokens: int) -> Loaded:
    kind = TYPES[of]

    def gated(context: int, layer: Layer, x: int, ids: int) -> int:
        return int(ggml.moe_up_gate(context, layer.up, layer.gate, x, ids, _SILU))

    layers = Layers(ggml, gated, shape, count, kind.number, ggml.plain_memory)
    for name, bits in (("gate", dense.gate), ("up", dense.up), ("down", dense.down)):
        if of == "bf16":
            layers.fill(name, np.concatenate([_interleaved(ggml, one) for one in bits]))
        else:
            layers.fill(name, np.concatenate([ggml.quantized(kind.number, bf16_values(one)) for one in bits]))
    return Loaded(layers.prepare, kind.bits, layers.close)


def _interleaved(ggml: Ggml, bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Sixteen rows of bfloat16 side by side."""
    out = np.empty_like(bits)
    ggml.repack_bf16_bf16_r16(bits.ctypes.data, out.ctypes.data, *bits.shape)
    return out


if __name__ == "__main__":
    main(run)
