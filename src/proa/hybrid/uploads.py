"""Copies of experts from RAM to the device, ordered with the steps' launches in both directions: a copy can start after
a launch, and a launch can wait for a copy. The host waits for neither, only for ids that it fetches. Never: choosing
experts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proa.hybrid.copies import HostCopier, HostCopy
from proa.hybrid.cuda_driver import Driver
from proa.hybrid.layer_memory import LayerMemory
from proa.native.weights import Piece
from proa.ops.host_block import HostBlock

MEASURED_BYTES = 256 << 20


@dataclass(frozen=True)
class Transfer:
    """Copy `nbytes` from address `source` in RAM to address `to` on the device."""

    to: int
    source: int
    nbytes: int


def transfers_of(numbers: Sequence[int], pieces: Sequence[Piece], to: int) -> list[Transfer]:
    """Copies of the matrices with these ascending numbers to address `to`, one behind the other. Neighbours are copied
    at once if each lies in one piece."""
    if len(pieces) > 1:
        sources = [(piece.address + number * piece.stride, piece.nbytes) for number in numbers for piece in pieces]
        firsts = itertools.accumulate((nbytes for _, nbytes in sources), initial=to)
        return [Transfer(first, *source) for first, source in zip(firsts, sources, strict=False)]
    (piece,), found, first = pieces, list[Transfer](), 0
    for i, number in enumerate(numbers, 1):
        if i == len(numbers) or numbers[i] != number + 1:
            source = piece.address + numbers[first] * piece.stride
            found.append(Transfer(to + first * piece.nbytes, source, (i - first) * piece.nbytes))
            first = i
    return found


class Upload(Protocol):
    """Transfers that were started together."""

    def join(self) -> None:
        """What is launched from now on, on the current stream, sees all bytes of the upload."""

    def done(self) -> bool:
        """True once all bytes have arrived, visible to work that is launched from now on."""

    def seconds(self) -> float | None:
        """Duration of the transfers; None until they are complete."""


class Fetched(Protocol):
    def wait(self) -> NDArray[np.int32]:
        """Wait for the device. Returns the values, flat, valid until the next fetch."""


class Mark(Protocol):
    """A point in the order of launches on the current stream."""

    @property
    def passed(self) -> bool:
        """Whether the device has done all that was launched before."""

    def seconds_since(self, earlier: Self) -> float:
        """Device time between two marks that were passed."""


M = TypeVar("M", bound=Mark)


class Uploads(Protocol[M]):
    def start(self, transfers: Sequence[Transfer], after: M | None, owners: object) -> Upload:
        """Start transfers, behind those started before, once the device has passed `after`. owners: of the memory on
        both sides."""

    def mark(self) -> M:
        """A mark after everything launched so far on the current stream."""

    def fetch(self, ids: Tensor, calm: M | None = None) -> Fetched:
        """Start to copy `ids`, at most as many as the uploads were made for, to the host, behind everything launched so
        far on the current stream. At most one fetch at a time. calm: the wait may keep a CPU busy once the device has
        passed this, since no worker needs it then; None: it may not."""

    def close(self) -> None:
        """Wait for all transfers that were started."""


class GpuUploads:
    """Uploads by DMA, on a CUDA stream of their own, from registered RAM. Call `close` before memory is freed."""

    def __init__(self, device: torch.device, most_ids: int = 0) -> None:
        """most_ids: of a fetch."""
        self._driver, self._device = Driver(), device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._fetched = HostBlock((most_ids,), torch.int32, device)

    def start(self, transfers: Sequence[Transfer], after: GpuMark | None, owners: object) -> Upload:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if after is not None:
            self._stream.wait_event(after.event)
        begin.record(self._stream)
        stream = self._stream.cuda_stream
        for transfer in transfers:
            self._driver.copy_to_device(stream, transfer.to, transfer.source, transfer.nbytes)
        end.record(self._stream)
        return _GpuUpload(self._device, begin, end)

    def mark(self) -> GpuMark:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return GpuMark(event)

    def fetch(self, ids: Tensor, calm: GpuMark | None = None) -> Fetched:
        self._fetched.copy_from(ids.to(torch.int32))
        event = torch.cuda.Event(blocking=calm is None)  # type: ignore[no-untyped-call]  # else CUDA spins
        event.record(torch.cuda.current_stream(self._device))
        return _GpuFetched(event, self._fetched.host[: ids.numel()], calm)

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True)
class GpuMark:
    event: torch.cuda.Event

    @property
    def passed(self) -> bool:
        done: bool = self.event.query()  # type: ignore[no-untyped-call]
        return done

    def seconds_since(self, earlier: GpuMark) -> float:
        took_ms: float = earlier.event.elapsed_time(self.event)
        return took_ms * 1e-3


@dataclass(frozen=True)
class _GpuFetched:
    event: torch.cuda.Event
    host: Tensor
    calm: GpuMark | None

    def wait(self) -> NDArray[np.int32]:
        if self.calm is not None:
            self.calm.event.synchronize()  # its thread sleeps: until then CPU workers may need this CPU
        self.event.synchronize()
        values: NDArray[np.int32] = self.host.numpy()
        return values


class _GpuUpload:
    def __init__(self, device: torch.device, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._device, self._begin, self._end = device, begin, end

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def done(self) -> bool:
        arrived: bool = self._end.query()  # type: ignore[no-untyped-call]
        return arrived

    def seconds(self) -> float | None:
        if not self.done():
            return None
        took_ms: float = self._begin.elapsed_time(self._end)
        return took_ms * 1e-3


def measured_upload(memory: LayerMemory, device: torch.device) -> float:
    """Bytes/s at which experts of the layer are copied to the device, MEASURED_BYTES of them."""
    shape, uploads = memory.shape, GpuUploads(device)
    sizes = (shape.up.matrix_bytes, shape.down.matrix_bytes)
    to = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    transfers: list[Transfer] = []
    while sum(transfer.nbytes for transfer in transfers) < MEASURED_BYTES:
        for part in memory.pieces():
            for number in range(len(memory.in_ram)):
                sources = ((piece.address + number * piece.stride, piece.nbytes) for piece in part)
                transfers += [Transfer(to.data_ptr(), source, nbytes) for source, nbytes in sources]
    torch.cuda.synchronize(device)  # `to` is not used by another stream
    rates = []
    for _ in range(2):  # the first one wakes the link
        upload = uploads.start(transfers, None, (memory, to))
        uploads.close()
        rates.append(sum(transfer.nbytes for transfer in transfers) / (upload.seconds() or 1.0))
    return max(rates)


class HostUploads:
    """The uploads of a simulated GPU, which computes a launch before it returns: whatever was launched is done. The
    owners of memory are kept until its transfers are complete: touching unmapped memory would end the process."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._copier = HostCopier(bytes_per_s)

    def start(self, transfers: Sequence[Transfer], after: HostMark | None, owners: object) -> Upload:
        return _HostUpload(self._copier.start_spans([(t.to, t.source, t.nbytes) for t in transfers], owners))

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter())

    def fetch(self, ids: Tensor, calm: HostMark | None = None) -> Fetched:
        return HostFetched(ids.flatten().numpy().astype(np.int32))

    def close(self) -> None:
        self._copier.close()


@dataclass(frozen=True)
class HostMark:
    at_s: float
    passed = True

    def seconds_since(self, earlier: HostMark) -> float:
        return self.at_s - earlier.at_s


@dataclass(frozen=True)
class HostFetched:
    values: NDArray[np.int32]

    def wait(self) -> NDArray[np.int32]:
        return self.values


class _HostUpload:
    def __init__(self, copy: HostCopy) -> None:
        self._copy = copy

    def join(self) -> None:
        self._copy.arrived.wait()

    def done(self) -> bool:
        return self._copy.done()

    def seconds(self) -> float | None:
        return self._copy.seconds if self._copy.done() else None
