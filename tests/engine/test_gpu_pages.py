"""Runs of KV pages between a GPU and pinned RAM: the bytes that copies in RAM give."""

from __future__ import annotations

import pytest
import torch

from proa.engine.executors.page_copies import HostPages, RunLayout, layout_of, new_buffer, new_pages
from proa.ops.caches import Caches, KvPages, LatentPages

pytestmark = pytest.mark.gpu
PAGES, RUN_PAGES, RUNS = 40, 4, 9  # more runs than are written at once
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def layout_on(device: torch.device) -> RunLayout:
    random = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(PAGES, 16, *shape, generator=random).to(device, torch.bfloat16)

    made: Caches = ((KvPages(some(2, 72), some(2, 72)),), (LatentPages(some(20), 16),))
    return layout_of(made, RUN_PAGES)


def assert_same(got: RunLayout, want: RunLayout) -> None:
    for rows, expected in zip(got.rows, want.rows, strict=True):
        assert torch.equal(rows.cpu(), expected)


def test_warming_up_changes_nothing() -> None:
    layout = layout_on(GPU)
    new_pages(layout).warm_up()
    assert_same(layout, layout_on(CPU))


@pytest.mark.parametrize("pages", [[7, 0, 39, 5], [3], [9, 8]], ids=str)
def test_read(pages: list[int]) -> None:
    layout, host = layout_on(GPU), layout_on(CPU)
    got, want = new_buffer(layout), torch.zeros(host.nbytes, dtype=torch.uint8)
    copies = new_pages(layout)
    copies.read([1, 2, 3, 4], got)
    copies.read(pages, got)
    HostPages(host).read(pages, want)
    assert got.is_pinned()
    assert torch.equal(got, want)


def test_many_writes_before_one_wait() -> None:
    layout, host = layout_on(GPU), layout_on(CPU)
    copies, there = new_pages(layout), HostPages(host)
    buffers = [new_buffer(layout).random_(0, 256) for _ in range(RUNS)]
    for number, run in enumerate(buffers):
        first = number % RUN_PAGES
        pages = list(range(number * RUN_PAGES + first, (number + 1) * RUN_PAGES))[::-1]
        copies.begin_write(run, first, pages)
        there.begin_write(run, first, pages)
    copies.finish()
    assert_same(layout, host)
