"""torch dtypes by their names in plans."""

from __future__ import annotations

import torch

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
