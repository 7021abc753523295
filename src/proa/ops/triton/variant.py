"""How a kernel is compiled, said once: tools/check_kernels.py builds every variant for every architecture, without a
GPU. Each module of kernels has `variants()`, which names those that its launchers use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """`types`: of the arguments that are not constants, as Triton writes them: "*bf16", "i32", "fp32"."""

    kernel: Any  # what @triton.jit returns
    types: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = field(default=())  # arguments that are multiples of 16: addresses, strides
    least: int = 75  # the oldest architecture it is meant for, as its compute capability
    shared_kib: int = 0  # that a block may ask for where it is launched
    newest: int | None = None  # the newest architecture, where those after it get another variant
