"""Runs of KV pages between the caches' tensors and a buffer: the same bytes as by indexing, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proa.engine.executors.page_copies import HostPages, RunLayout, layout_of
from proa.ops.caches import Caches, KvPages, LatentPages
from proa.ops.cuda_pages import RunMover
from proa.ops.triton.pages import page_table

PAGES, RUN_PAGES = 11, 4
# The shape of a page of K and V, and of latents, with their dtypes: pages longer and shorter than a program's block,
# words of 8, 4, 2 and 1 bytes.
SHAPES = {
    "long": ((16, 4, 160), (16, 40), torch.bfloat16),
    "words of 4": ((3, 2, 9), (3, 10), torch.bfloat16),
    "words of 2": ((1, 1, 33), (1, 7), torch.bfloat16),
    "words of 1": ((1, 1, 33), (1, 8), torch.float8_e4m3fn),
}


def caches(shape: str, device: torch.device, seed: int = 1) -> Caches:
    random = torch.Generator().manual_seed(seed)
    kv, latents, dtype = SHAPES[shape]

    def some(*size: int, of: torch.dtype = dtype) -> Tensor:
        raw = torch.randint(0, 256, (PAGES, *size[:-1], size[-1] * of.itemsize), generator=random, dtype=torch.uint8)
        return raw.to(device).view(of)

    return (KvPages(some(*kv), some(*kv)),), (LatentPages(some(*latents, of=torch.bfloat16), 4),)


def on(layout: RunLayout, device: torch.device) -> Tensor:
    return torch.full((layout.nbytes,), 7, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pages", [[3, 0, 10, 4], [9], [1, 2]], ids=str)
def test_gather(shape: str, pages: list[int], device: torch.device) -> None:
    layout, host = layout_of(caches(shape, device), RUN_PAGES), layout_of(caches(shape, torch.device("cpu")), RUN_PAGES)
    got, want = on(layout, device), on(host, torch.device("cpu"))
    RunMover(layout.rows, layout.starts).gather(torch.tensor(pages, device=device), got)
    if len(pages) < RUN_PAGES:
        for part, rows in zip(host.parts(want), host.rows, strict=True):
            part[: len(pages)] = rows[pages]
    else:
        HostPages(host).read(pages, want)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("pages", "first"), [([3, 0, 10, 4], 0), ([9], 3), ([1, 2], 1)], ids=str)
def test_scatter(shape: str, pages: list[int], first: int, device: torch.device) -> None:
    layout, host = layout_of(caches(shape, device), RUN_PAGES), layout_of(caches(shape, torch.device("cpu")), RUN_PAGES)
    run = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    RunMover(layout.rows, layout.starts).scatter(torch.tensor(pages, device=device), run.to(device), first)
    HostPages(host).begin_write(run, first, pages)
    for got, want in zip(layout.rows, host.rows, strict=True):
        assert torch.equal(got.cpu(), want)


def test_tensors_that_do_not_fit() -> None:
    rows = torch.zeros(4, 6, dtype=torch.int64)
    for wrong in ([rows, rows.int()], [rows[:, :3]], [rows[0]]):
        with pytest.raises(ValueError, match="tensors of pages"):
            page_table(wrong, [0] * len(wrong))
    with pytest.raises(ValueError, match="do not fit"):
        RunMover([rows], [0]).gather(torch.zeros(2, dtype=torch.int32), torch.zeros(192, dtype=torch.uint8))
