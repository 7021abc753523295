"""Host memory that is copied to a device, or filled by it, in launch order. Never: its contents.

On a GPU a kernel reads or writes it over PCIe. A copy engine takes copies in order, whatever their stream, so a copy of
a few KB would wait until all experts that were queued before have arrived: up to 45 ms beside a streamed prompt
(docs/lab/prefill-h200.md).
"""

from __future__ import annotations

from collections import deque
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

    def copy_from(self, source: Tensor) -> None:
        """Start to copy `source`, of the block's type, to the block's first elements. The host may read them once the
        device has passed what was launched until now."""
        flat = source.reshape(-1)
        if self._seen is None:
            self.host.view(-1)[: len(flat)].copy_(flat)
        else:
            torch.bitwise_or(flat, 0, out=self._seen.view(-1)[: len(flat)])


class Sender:
    """Copies integer tensors to a device as they are now: the host may change them at once."""

    def __init__(self) -> None:
        self._unread = deque[tuple[torch.cuda.Event, Tensor]]()  # pinned copies that a kernel may still read

    def send(self, source: Tensor, to: Tensor) -> None:
        """Start to copy `source` to `to`, contiguous and of equal shape and type, on the current stream."""
        if not to.is_cuda:
            to.copy_(source)
            return
        while self._unread and self._unread[0][0].query():  # type: ignore[no-untyped-call]
            self._unread.popleft()
        pinned, done = source.pin_memory(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch.bitwise_or(torch.as_tensor(_Mapped(pinned), device=to.device), 0, out=to)
        done.record()
        self._unread.append((done, pinned))


def copy_on_device(source: Tensor, to: Tensor) -> None:
    """Copy bytes, uint8, from one place in a device's memory to another by a kernel: no copy engine takes part, whose
    queue may be long."""
    wide = torch.int64 if all(t.numel() % 8 == 0 and t.data_ptr() % 8 == 0 for t in (source, to)) else torch.uint8
    torch.bitwise_or(source.view(-1).view(wide), 0, out=to.view(-1).view(wide))


class _Mapped:
    """Pinned host memory for torch.as_tensor: the device has it at the same address (unified virtual addressing)."""

    def __init__(self, host: Tensor) -> None:
        kinds = {torch.int32: "<i4", torch.int64: "<i8"}
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": kinds[host.dtype], "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip
