"""Blocks of host memory that are copied to a device in launch order."""

from __future__ import annotations

import pytest
import torch

from proa.ops.host_block import HostBlock

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("shape", "count"), [((7,), None), ((7,), 3), ((5, 3), 2), ((1024,), 0), ((0,), None)])
def test_rows_are_copied(device: str, dtype: torch.dtype, shape: tuple[int, ...], count: int | None) -> None:
    block = HostBlock(shape, dtype, torch.device(device))
    target = torch.full(shape, -7, dtype=dtype, device=device)
    for offset in range(3):
        block.host.copy_(torch.arange(block.host.numel(), dtype=dtype).view(shape) * (1 << 28) - offset)
        block.copy_to(target, count)
        if device == "cuda":
            torch.cuda.synchronize()
        end = shape[0] if count is None else count
        assert torch.equal(target[:end].cpu(), block.host[:end])
        assert (target[end:] == -7).all()


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_bulk_copies() -> None:
    block = HostBlock((4096,), torch.int32, torch.device("cuda"))
    target = torch.zeros(4096, dtype=torch.int32, device="cuda")
    bulk = torch.zeros(1 << 28, dtype=torch.uint8, pin_memory=True)
    to = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    behind = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    begin, done, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    block.copy_to(target)  # loads the kernel
    torch.cuda.synchronize()
    begin.record()
    behind.wait_event(begin)
    with torch.cuda.stream(behind):
        for _ in range(4):
            to.copy_(bulk, non_blocking=True)
        end.record()
    block.copy_to(target)
    done.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(done) < begin.elapsed_time(end) / 4
