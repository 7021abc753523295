"""Registered RAM: copies and kernels of the GPU use it at the CPU's addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from proa.hybrid.copies import GpuCopier
from proa.hybrid.pinning import register
from proa.native.pool import Pool
from proa.ops.packed import Memory

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Pool([[], []], pin=False) as pool:
        yield Memory(pool, [None, None])


def test_spans_hold_all_allocations(memory: Memory) -> None:
    taken = [(memory.take(sizes), sizes) for sizes in ([3 * MIB, 100], [0, 70 * MIB], [5, 0])]
    spans = memory.spans()
    assert all(address % 4096 == 0 and nbytes % 4096 == 0 for address, nbytes in spans)
    for addresses, sizes in taken:
        for address, nbytes in zip(addresses, sizes, strict=True):
            inside = [at for at, length in spans if at <= address and address + nbytes <= at + length]
            assert len(inside) == 1 or not nbytes


@pytest.mark.gpu
def test_copies_to_and_from_registered_ram(memory: Memory, device: torch.device) -> None:
    address, _ = memory.take([8 * MIB, 0])
    spans = memory.spans()
    for _ in range(2):  # after close() it can be registered again
        registered = register(spans, device)
        assert registered.nbytes == sum(nbytes for _, nbytes in spans)
        assert registered.in_place, registered.why
        here = torch.frombuffer((ctypes.c_uint8 * (8 * MIB)).from_address(address), dtype=torch.uint8)
        assert here.is_pinned()
        there = torch.randint(0, 255, (8 * MIB,), dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        copier = GpuCopier(device)
        back = torch.empty_like(there)
        copies = [copier.start([(here, there)]), copier.start([(back, here)])]
        copier.close()
        assert all(copy.done() for copy in copies)
        assert torch.equal(here, there.cpu())
        assert torch.equal(back, there)
        registered.close()


@pytest.mark.gpu
def test_refused_registration_names_the_drivers_error(memory: Memory, device: torch.device) -> None:
    memory.take([MIB, 0])
    spans = memory.spans()
    registered = register([*spans, *spans], device)  # each span twice
    assert registered.spans == spans
    assert not registered.in_place
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in registered.why
    registered.close()
    torch.zeros(4, device=device).sum().item()  # torch has no sticky error
