"""The rate at which runs of KV pages come back from pinned RAM and are stored there, against PCIe in the same process,
and what the parts of a restore take alone. No model, no weights: the caches of a shape and the tiers' own threads.

    python benchmarks/probes/restore_rate.py            # Qwen3-30B-A3B cut to 24 layers, 16128 tokens
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.cache.keys import run_pages
from proa.cache.pool import allocate_pool
from proa.cache.ram import RamStore
from proa.engine.executors.page_copies import layout_of
from proa.engine.executors.page_tiers import EntryCopies, PageTiers
from proa.engine.executors.run_buffers import RunBuffers
from proa.engine.scheduling.tiers import Restore, Run, Store
from proa.models.families import declare
from proa.ops.cuda_pages import RunMover
from proa.ops.gpu_time import fastest_s

PAGE_TOKENS, GIB, ROUNDS = 16, 1 << 30, 6
GPU = torch.device("cuda", 0)
RUN_PAGES = run_pages(PAGE_TOKENS)


@dataclass
class Box:
    """Tiers over caches whose pages are scattered: run i has every num_runs-th page from i on."""

    tiers: PageTiers
    ram: RamStore
    copies: Callable[[], EntryCopies]
    tensors: Sequence[Tensor]
    num_runs: int
    nbytes: int  # of a run

    def runs(self, seed: int) -> list[Run]:
        pages = range(self.num_runs * RUN_PAGES)
        return [Run(self.key(seed, i), list(pages[i :: self.num_runs])) for i in range(self.num_runs)]

    def key(self, seed: int, number: int) -> bytes:
        return (seed << 32 | number).to_bytes(16, "little")

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.nbytes

    def say(self, what: str, seconds: float, pcie: float, more: str = "") -> None:
        rate = self.total_bytes / seconds
        print(f"{what:58} {seconds * 1e3:7.2f} ms {rate / 1e9:6.1f} GB/s {rate / pcie:5.0%} of PCIe{more}", flush=True)


def wait(job: Store | Restore) -> None:
    while not job.done:
        time.sleep(2e-5)


def new_box(shape: str, layers: int, tokens: int) -> Box:
    spec = declare(MODEL_SHAPES[shape].cut(layers).config()).spec
    num_runs = tokens // (RUN_PAGES * PAGE_TOKENS)
    caches = allocate_pool(spec, num_runs * RUN_PAGES, PAGE_TOKENS, torch.bfloat16, GPU, sequences=1)
    copies = partial(EntryCopies, caches, RUN_PAGES)
    buffers = RunBuffers(copies().nbytes, GPU)
    ram = RamStore(num_runs * buffers.nbytes, buffers)
    began = time.perf_counter()
    tiers = PageTiers(b"root", RUN_PAGES, copies, (), None, ram)
    print(f"threads started and warmed up in {(time.perf_counter() - began) * 1e3:.1f} ms")
    tensors = [tensor for layer in caches for cache in layer for tensor in cache.page_tensors]
    for tensor in tensors:
        tensor.normal_()
    torch.cuda.synchronize()
    return Box(tiers, ram, copies, tensors, num_runs, copies().nbytes)


def through_tiers(box: Box, pcie: float) -> None:
    for seed, what in ((1, "stored, buffers pinned meanwhile"), (2, "stored into buffers that others had")):
        job, began = Store(box.runs(seed)), time.perf_counter()
        box.tiers.store(job)
        wait(job)
        box.say(what, time.perf_counter() - began, pcie)
    before = [tensor.clone() for tensor in box.tensors]
    for tensor in box.tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        first, job = box.tiers.ram_stats(), Restore(box.runs(2))
        began = time.perf_counter()
        box.tiers.restore(job)
        wait(job)
        seconds, last = time.perf_counter() - began, box.tiers.ram_stats()
        stats = (last.restored_bytes - first.restored_bytes) / (last.restore_seconds - first.restore_seconds)
        box.say(f"restored, {number + 1}", seconds, pcie, f"; by statistics {stats / 1e9:.1f} GB/s {stats / pcie:.0%}")
        assert job.num_restored == box.num_runs
    torch.cuda.synchronize()
    assert all(torch.equal(tensor, was) for tensor, was in zip(box.tensors, before, strict=True)), "other bytes"


def parts_alone(box: Box, pcie: float) -> None:
    """One thread, which launches all runs and waits once."""
    runs, copies = box.runs(2), box.copies()
    layout = layout_of(((_Tensors(box.tensors),),), RUN_PAGES)  # type: ignore[arg-type]
    mover, staged = RunMover(layout.rows, layout.starts), torch.zeros(box.nbytes, dtype=torch.uint8, device=GPU)
    at = [torch.tensor(run.pages, device=GPU) for run in runs]
    with ExitStack() as held:
        buffers = [held.enter_context(box.ram.reading(run.key)) for run in runs]
        assert all(buffer is not None for buffer in buffers)

        def one_thread() -> None:
            for run, buffer in zip(runs, buffers, strict=True):
                assert buffer is not None
                copies.begin_write(buffer, run)
            copies.finish()

        def host_s() -> float:
            began = time.perf_counter()
            for run, buffer in zip(runs[:4], buffers[:4], strict=True):
                assert buffer is not None
                copies.begin_write(buffer, run)
            took = time.perf_counter() - began
            copies.finish()
            return took

        for _ in range(3):
            began = time.perf_counter()
            one_thread()
            took = time.perf_counter() - began
        box.say("one thread, no wait between four runs", took, pcie)
        print(f"the host launches four runs in {min(host_s() for _ in range(5)) * 1e6:.0f} us")
        box.say("copies alone", fastest_s(lambda: [staged.copy_(b, non_blocking=True) for b in buffers], 3), pcie)
        scattered = fastest_s(lambda: [mover.scatter(pages, staged, 0) for pages in at], 3)
        box.say("kernels alone, from VRAM", scattered, pcie, f"; {scattered / box.num_runs * 1e6:.0f} us a run")
        direct = fastest_s(lambda: [mover.scatter(p, b, 0) for p, b in zip(at, buffers, strict=True)], 3)
        box.say("kernels that read pinned RAM, no copies", direct, pcie)


@dataclass
class _Tensors:
    page_tensors: Sequence[Tensor]


def pcie_rates() -> float:
    """Bytes/s of one large copy to the GPU; prints both directions."""
    there, here = torch.zeros(GIB, dtype=torch.uint8, device=GPU), torch.zeros(GIB, dtype=torch.uint8, pin_memory=True)
    to, back = (
        GIB / fastest_s(partial(a.copy_, b, non_blocking=True), 3) for a, b in ((there, here), (here, there))
    )  # fmt: skip
    print(f"PCIe, copies of 1 GiB: {to / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} back")
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16128)
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    pcie = pcie_rates()
    box = new_box(asked.shape, asked.layers, asked.tokens)
    print(f"{box.num_runs} runs of {box.nbytes / 1e6:.1f} MB, {box.total_bytes / 1e6:.0f} MB: at least "
          f"{box.total_bytes / pcie * 1e3:.2f} ms")  # fmt: skip
    through_tiers(box, pcie)
    parts_alone(box, pcie)
    box.tiers.close()


if __name__ == "__main__":
    main()
