"""Random blocks of GGUF's quantised types, with scales of ordinary magnitude."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

# Where the float16 scales and minimums of a block are.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """uint8 [rows, row bytes]; scales of blocks between 0.001 and 0.01."""
    elems, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, columns // elems, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        raw[..., at : at + 2] = rng.uniform(0.001, 0.01, (*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(118, 121, raw.shape[:2])  # 2^-9 to 2^-7
    return raw.reshape(rows, -1)
