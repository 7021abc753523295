"""What launchers of kernels must know of a GPU. Never: which GPU is used, how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Shared memory that a block may ask for, in KiB, by compute capability: the multiprocessor's, but for what CUDA keeps.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_FIRST_WITH_E4M3 = 89


@dataclass(frozen=True)
class GpuTraits:
    """capability: 90 for 9.0. processors: multiprocessors; only numbers that kernels get depend on them, not what is
    compiled, so that a GPU's kernels can be compiled where it is not."""

    capability: int
    processors: int

    @property
    def shared_bytes(self) -> int:
        """Of a capability that is not in the table: what the next older one has."""
        known = [capability for capability in SHARED_KIB if capability <= self.capability]
        return SHARED_KIB[max(known, default=min(SHARED_KIB))] << 10

    @property
    def converts_e4m3(self) -> bool:
        """In hardware."""
        return self.capability >= _FIRST_WITH_E4M3


def traits_of(device: torch.device) -> GpuTraits:
    """device: of CUDA, which is initialised if it was not."""
    major, minor = torch.cuda.get_device_capability(device)
    return GpuTraits(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)
