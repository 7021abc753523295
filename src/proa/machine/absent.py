"""This machine with a GPU that is not in it, so that a plan for it can be made. Never: decisions."""

from __future__ import annotations

import re

import msgspec

from proa.errors import UsageError
from proa.machine.machine import Gpu, Machine

_ARCH = re.compile(r"sm_(\d{1,2})(\d)")
_RAM_BYTES = 1 << 44  # more than any model takes: what a machine elsewhere has is not known


def with_gpu(machine: Machine, arch: str, vram_bytes: int) -> Machine:
    """arch: such as sm_90. vram_bytes: all of the GPU's memory, free. RAM is no limit. Raises UsageError."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise UsageError(
            f"--arch {arch} is no architecture.", "Name one as sm_90, which is a Hopper GPU.", param="arch"
        )
    capability = int(found[1]), int(found[2])
    gpu = Gpu(
        index=0, name=f"{arch}, not here", total_bytes=vram_bytes, free_bytes=vram_bytes, capability=capability
    )  # fmt: skip
    cuda = machine.torch_cuda or "not here"
    ram = max(machine.total_bytes, _RAM_BYTES)
    return msgspec.structs.replace(
        machine, gpus=(gpu,), torch_cuda=cuda, total_bytes=ram, available_bytes=ram, memory_bound_by=""
    )  # fmt: skip
