"""Copies of experts to the device: split, in batches for the driver or one by one, with the same bytes."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from have_gpu import HAVE_GPU
from proa.errors import NativeError
from proa.hybrid import uploads
from proa.hybrid.cuda_driver import _SIGNATURES, Driver
from proa.hybrid.uploads import BATCH, MOST_BYTES, GpuUploads, Transfer, batches_of

STREAM = 7


@given(st.lists(st.integers(1, 3 * MOST_BYTES + 1), max_size=3 * BATCH))
def test_batches_copy_each_byte_once_and_in_order(sizes: list[int]) -> None:
    """Transfers to consecutive addresses, from every second range of as many bytes in RAM."""
    begins = [*itertools.accumulate(sizes, initial=0)]
    transfers = [Transfer(to, 1000 + 2 * to, nbytes) for to, nbytes in zip(begins, sizes, strict=False)]
    batches = list(batches_of(transfers))
    assert all(batch.shape[1] == BATCH for batch in batches[:-1])
    assert all(0 < batch.shape[1] <= BATCH and batch.flags.c_contiguous for batch in batches)
    at, source_of = 0, {transfer.to: transfer.source for transfer in transfers}
    for to, source, nbytes in itertools.chain.from_iterable(batch.T.tolist() for batch in batches):
        first = max(begin for begin in source_of if begin <= to)
        assert (to, source - source_of[first]) == (at, to - first)
        assert 0 < nbytes <= MOST_BYTES
        at += nbytes
    assert at == begins[-1]


class Library:
    """A driver's functions that count as called by the real one's types."""

    def __init__(self, version: int = 13000, code: int = 0) -> None:
        self.version, self.code, self.seen = version, code, list[tuple[int, ...]]()

    def driver(self) -> Driver:
        found = Driver(ctypes.util.find_library("c") or "libc.so.6")
        batch_type = ctypes.CFUNCTYPE(
            ctypes.c_int, *[ctypes.POINTER(ctypes.c_uint64)] * 3, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint32),
            ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p,
        )  # fmt: skip
        self._batch = batch_type(self._copy_batch)
        typed: Any = ctypes.CFUNCTYPE(ctypes.c_int, *_SIGNATURES["cuMemcpyBatchAsync"])
        found._functions["cuMemcpyBatchAsync"] = typed(ctypes.cast(self._batch, ctypes.c_void_p).value)
        found._functions["cuDriverGetVersion"] = self._get_version
        found._cuda.cuGetErrorName = lambda code, text: 0
        return found

    def _get_version(self, to: int) -> int:
        ctypes.c_int.from_address(to).value = self.version
        return 0

    def _copy_batch(self, *given: Any) -> int:
        to, source, nbytes, count, attributes, from_first, kinds, failed, stream = given
        assert (count, from_first[0], kinds, stream) == (2, 0, 1, STREAM)
        assert attributes[:6] == [1, 0, 0, 0, 0, 0], "in stream order, without hints and flags"
        assert failed
        self.seen += zip(to[:count], source[:count], nbytes[:count], strict=True)
        return self.code


def test_a_batch_reaches_the_driver() -> None:
    library = Library()
    driver, copies = library.driver(), np.array([[10, 1 << 40], [20, 2 << 40], [3, 5 << 33]], np.uint64)
    driver.copy_batch_to_device(STREAM, copies)
    assert library.seen == [(10, 20, 3), (1 << 40, 2 << 40, 5 << 33)]
    library.code = 2
    with pytest.raises(NativeError, match="cuMemcpyBatchAsync failed: error 2"):
        driver.copy_batch_to_device(STREAM, copies)


@pytest.mark.parametrize(("version", "has"), [(12070, False), (12080, True), (13000, True)])
def test_the_driver_has_batches_since_cuda_12_8(version: int, has: bool) -> None:
    assert Library(version).driver().has_copy_batches() is has


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="needs a GPU")
@pytest.mark.parametrize("in_batches", [True, False])
def test_the_gpu_gets_the_same_bytes(monkeypatch: pytest.MonkeyPatch, in_batches: bool) -> None:
    if in_batches:
        assert Driver().has_copy_batches(), "a driver of CUDA 12.8 or newer is expected here"
    monkeypatch.setattr(Driver, "has_copy_batches", lambda self: in_batches)
    monkeypatch.setattr(uploads, "MOST_BYTES", 1000)
    source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8).pin_memory()
    to = torch.zeros_like(source, device="cuda")
    cuts = [0, 1, 4097, 70_000, 70_001, 500_000, 1 << 20]
    transfers = [Transfer(to.data_ptr() + a, source.data_ptr() + a, b - a) for a, b in itertools.pairwise(cuts)]
    torch.cuda.synchronize()
    copying = GpuUploads(torch.device("cuda", 0))
    upload = copying.start(transfers[::-1], None, (source, to))
    copying.close()
    assert upload.seconds()
    assert torch.equal(to.cpu(), source)
