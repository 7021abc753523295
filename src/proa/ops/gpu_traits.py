"""Properties of a GPU that kernel launchers need. Never: which GPU is used, how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from proa.ops.sizes import E4M3_CAPABILITY

# Compute capability -> shared memory that a thread block may use, in KiB (the SM's, minus what CUDA reserves).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


@dataclass(frozen=True)
class GpuTraits:
    """capability: compute capability, 90 for 9.0. processors: number of SMs. Kernels are compiled for the capability
    only and get numbers derived from `processors` as arguments, so that they can be compiled on another machine."""

    capability: int
    processors: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory per thread block; for a capability not in the table, that of the next lower one."""
        known = [capability for capability in SHARED_KIB if capability <= self.capability]
        return SHARED_KIB[max(known, default=min(SHARED_KIB))] << 10

    @property
    def converts_e4m3(self) -> bool:
        """True if the GPU converts E4M3 in hardware."""
        return self.capability >= E4M3_CAPABILITY


def traits_of(device: torch.device) -> GpuTraits:
    """Traits of a CUDA device; initialises CUDA."""
    major, minor = torch.cuda.get_device_capability(device)
    return GpuTraits(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)
