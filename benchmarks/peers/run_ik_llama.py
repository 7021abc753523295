"""ik_llama.cpp's expert kernels (of ik-llama-cpp-python) beside Proa. See README.md; the options are those of `proa
bench kernels`.

As ik_llama.cpp computes a layer when it rearranges weights for the CPU (`-rtr`): gate, up and SwiGLU as one operation,
mul_mat_id of down, weighting, sum. Types other than bf16 round activations to 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from beside import main
from ggml_calls import IK_LLAMA, Ggml
from ggml_layers import Layer, Program, Type, run_beside

_SILU = 10  # ggml_unary_op

TYPES = {
    "bf16": Type("BF16_R16", 230, 16),
    "int8-g32": Type("Q8_0_R8", 208, 8.5),
    "int4-g32": Type("Q4_0_R8", 202, 4.5),
    "q4_k": Type("Q4_K_R4", 212, 4.5),
    "q6_k": Type("Q6_K_R4", 214, 6.5625),
}


def _gated(ggml: Ggml, context: int, layer: Layer, x: int, ids: int) -> int:
    return int(ggml.moe_up_gate(context, layer.up, layer.gate, x, ids, _SILU))


def _interleaved(ggml: Ggml, bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Sixteen rows of bfloat16 side by side."""
    out = np.empty_like(bits)
    ggml.repack_bf16_bf16_r16(bits.ctypes.data, out.ctypes.data, *bits.shape)
    return out


PROGRAM = Program(
    "ik_llama.cpp", "ik_llama_cpp", "ik-llama-cpp-python", ("ggml",), IK_LLAMA, TYPES, _gated, _interleaved
)


def run(argv: Sequence[str]) -> None:
    run_beside(PROGRAM, "run_ik_llama.py", argv)


if __name__ == "__main__":
    main(run)
