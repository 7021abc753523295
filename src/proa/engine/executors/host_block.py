"""Host memory that is copied to a device in launch order. Never: its contents.

On a GPU a kernel reads it over PCIe. A copy engine takes copies in order, whatever their stream, so a copy of a few KB
would wait until all experts that were queued before have arrived: up to 45 ms beside a streamed prompt
(docs/lab/prefill-h200.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostBlock:
    """`host`: zeros of this shape and integer type, pinned for a GPU."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=on_gpu)
        # The same memory, as a tensor of the GPU. None: `copy_` is used, as no kernel is needed.
        self._seen = torch.as_tensor(_Mapped(self.host), device=device) if on_gpu and self.host.numel() else None

    def copy_to(self, target: Tensor, count: int | None = None) -> None:
        """Start to copy the first `count` rows, by default all, to those of `target`, which has the block's type. The
        host memory must not change until that is done."""
        if self._seen is None:
            target[:count].copy_(self.host[:count])
        else:
            torch.bitwise_or(self._seen[:count], 0, out=target[:count])


class _Mapped:
    """Pinned memory, described as the device addresses it: at the same address (unified virtual addressing)."""

    def __init__(self, host: Tensor) -> None:
        kinds = {torch.int32: "<i4", torch.int64: "<i8"}
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": kinds[host.dtype], "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip
