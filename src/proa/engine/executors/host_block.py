"""Host memory that is copied to a device in launch order. Never: what is in it.

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
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._seen = self.host.to(device)  # the host memory itself, unless it is empty
        if device.type == "cuda" and self.host.numel():
            self._seen = torch.as_tensor(_Mapped(self.host), device=device)

    def copy_to(self, target: Tensor, count: int | None = None) -> None:
        """Start to copy the first `count` rows, by default all, to those of `target`, which has the block's type. The
        host memory must not change before that was done."""
        torch.bitwise_or(self._seen[:count], 0, out=target[:count])


class _Mapped:
    """Pinned memory, described as the device addresses it: at the same address (unified virtual addressing)."""

    def __init__(self, host: Tensor) -> None:
        kinds = {torch.int32: "<i4", torch.int64: "<i8"}
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": kinds[host.dtype], "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip
