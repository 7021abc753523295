"""Variants of kernels: tools/check_kernels.py compiles every variant for every architecture, without a GPU. Each module
of kernels has `variants()`, which lists those that its launchers use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with argument types, constants and compile options. types: of the arguments that are not constants, as
    Triton writes them: "*bf16", "i32", "fp32"."""

    kernel: Any  # the result of @triton.jit
    types: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = field(default=())  # arguments that are multiples of 16: addresses, strides
    least: int = 75  # the oldest compute capability it is meant for
    shared_kib: int = 0  # shared memory per thread block of the devices on which it is launched
    newest: int | None = None  # the newest compute capability, if newer ones use another variant
