"""llama.cpp's expert kernels (of llama-cpp-python) beside Proa. See README.md; the options are those of `proa bench
kernels`.

One graph a layer, as llama.cpp builds it: mul_mat_id of up and gate, SwiGLU, mul_mat_id of down, weighting, sum. Types
other than bf16 and fp16 round activations to 8 bits. Q4_0 is rearranged for the CPU when it is loaded, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from beside import main
from ggml_calls import LLAMA_CPP, Ggml
from ggml_layers import Layer, Program, Type, run_beside

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


def _gated(ggml: Ggml, context: int, layer: Layer, x: int, ids: int) -> int:
    up, gate = (ggml.mul_mat_id(context, one, x, ids) for one in (layer.up, layer.gate))
    return int(ggml.swiglu_split(context, gate, up))


def _as_they_are(_: Ggml, bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return bits


_LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")
PROGRAM = Program(
    "llama.cpp", "llama_cpp", "llama-cpp-python", _LIBRARIES, LLAMA_CPP, TYPES, _gated, _as_they_are
)


def run(argv: Sequence[str]) -> None:
    run_beside(PROGRAM, "run_llama_cpp.py", argv)


if __name__ == "__main__":
    main(run)
