"""Blocks of host memory that are copied to a device, or filled by it, in launch order."""

from __future__ import annotations

import pytest
import torch

from proa.ops.host_block import HostBlock, Sender, copy_on_device

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


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_read_back(device: str) -> None:
    block = HostBlock((12,), torch.int32, torch.device(device))
    ids = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    block.copy_from(ids)
    if device == "cuda":
        torch.cuda.synchronize()
    assert block.host.tolist() == [*range(8), 0, 0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_may_change_at_once(device: str) -> None:
    sender, source = Sender(), torch.zeros(3, 1000, dtype=torch.int32)
    targets = [torch.full((3, 1000), -1, dtype=torch.int32, device=device) for _ in range(20)]
    for number, target in enumerate(targets):
        source.fill_(number)
        sender.send(source, target)
        source.fill_(-7)
    assert [bool((target == number).all()) for number, target in enumerate(targets)] == [True] * 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "nbytes"), [(0, 4096), (8, 4096), (3, 4096), (0, 4099)])
def test_bytes_are_copied_on_a_device(first: int, nbytes: int, device: str) -> None:
    memory = torch.arange(5000, device=device).to(torch.uint8)
    target = torch.zeros(3, nbytes, dtype=torch.uint8, device=device)[1]
    copy_on_device(memory[first : first + nbytes], target)
    assert torch.equal(target, memory[first : first + nbytes])


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
