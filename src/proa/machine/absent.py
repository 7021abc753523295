"""Describes a machine with a GPU that is not present, to plan and compile for it (`proa warm --arch`)."""

from __future__ import annotations

import re

import msgspec

from proa.errors import UsageError
from proa.machine.machine import Gpu, Machine

_ARCH = re.compile(r"sm_(\d{1,2})(\d)")
_RAM_BYTES = 1 << 44  # more than any model needs: the target machine's RAM is unknown


def with_gpu(machine: Machine, arch: str, vram_bytes: int) -> Machine:
    """Return `machine` with one GPU of architecture `arch` (such as sm_90), `vram_bytes` of free memory, and
    practically unlimited RAM. Raises UsageError for a malformed `arch`."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise UsageError(
            f"--arch {arch} is not a GPU architecture.",
            "Give a compute capability in the form sm_90 (Hopper).",
            param="arch",
        )
    capability = int(found[1]), int(found[2])
    gpu = Gpu(
        index=0, name=f"{arch}, not present", total_bytes=vram_bytes, free_bytes=vram_bytes, capability=capability
    )  # fmt: skip
    cuda = machine.torch_cuda or "not present"
    ram = max(machine.total_bytes, _RAM_BYTES)
    return msgspec.structs.replace(
        machine, gpus=(gpu,), torch_cuda=cuda, total_bytes=ram, available_bytes=ram, memory_bound_by=""
    )  # fmt: skip
