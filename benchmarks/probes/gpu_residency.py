"""What moving experts and reading them in place cost on a GPU. Layers of Qwen3-30B-A3B's experts, half of them in VRAM.

  rates     the GPU reads 1 to 8 experts in registered RAM, alone and beside the CPU's workers, and what those read then
  co-fetch  microseconds a layer in a CUDA graph where m of 8 experts are missing and the GPU reads n of them in place
  copies    the same steps while experts are copied from RAM to VRAM on another stream, started after each launch
Weights are zeros, which are read as any others. Needs 1.2 GB of RAM and 0.6 GB of VRAM a layer.
Run: PYTHONPATH=src python benchmarks/probes/gpu_residency.py [--layers 16] [--workers N] [rates] [co-fetch] [copies]
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers, GpuCopier
from proa.hybrid.gpu_experts import GpuExperts, GpuSpaces, ReadInPlace
from proa.hybrid.gpu_transport import GpuTransport
from proa.hybrid.model import HybridModel, Parts, Placement
from proa.hybrid.pinning import register
from proa.hybrid.slots import Slot
from proa.machine.cost.co_fetch import InPlaceRates
from proa.models.ranks import CPU
from proa.native.doorbell import Service
from proa.native.pool import Pool
from proa.native.weights import Experts, Rows, moe
from proa.ops.cuda_device import device_ops
from proa.ops.packed import Memory
from proa.ops.residency import ExpertShape
from proa.ops.staging import Staging
from proa.ops.table import Chosen

DEVICE = torch.device("cuda:0")
SHAPE, EXPERTS, RESIDENT, TOP_K = ExpertShape(2048, 768), 128, 64, 8
BYTES = SHAPE.up.matrix_bytes + SHAPE.down.matrix_bytes
REPLAYS = 60


class Model:
    """Layers of routed experts alone, and a graph of all of them for one token."""

    def __init__(self, pool: Pool, layers: int, cpu: int) -> None:
        self.pool, self.ram, self.cpu = pool, Memory(pool, [None]), cpu
        owners = tuple(0 if e < RESIDENT else CPU for e in range(EXPERTS))
        placement = Placement(dict.fromkeys(range(layers), owners), inclusive=True)
        self.hybrid = HybridModel(placement, DEVICE, self.ram, Staging(pool, 1 << 20, pinned=True))
        for block in range(layers):
            for _, sink in self.hybrid.new_experts(EXPERTS, SHAPE.hidden, SHAPE.width, block=block).parameters():
                sink.expect("BF16")
        self.layers = [layer.memory for layer in self.hybrid.layers]
        self.stacks = [self._experts(i) for i in range(layers)]
        begin = time.perf_counter()
        self.registered = register(self.ram.spans(), DEVICE)
        print(
            f"{self.registered.nbytes / 1e9:.1f} GB {self.registered.why}, in place: {self.registered.in_place}, "
            f"{self.registered.nbytes / 1e9 / (time.perf_counter() - begin):.1f} GB/s"
        )
        self.spaces = GpuSpaces(device_ops(DEVICE), 8, TOP_K)
        parts = Parts(
            lambda memory, residency, faults: GpuExperts(memory, residency, self.spaces, faults),
            lambda of, size: GpuTransport(pool, of, size, DEVICE, self.spaces.ops, Service(cpus=(cpu,))),
            lambda: Copiers(GpuCopier(DEVICE), GpuCopier(DEVICE)),
            CoFetch(InPlaceRates(1.0, 0.0)),  # shares are set here
        )
        self.hybrid.bind(8, TOP_K, parts)
        self.hybrid.co_fetch = None
        self.stream = torch.cuda.Stream(DEVICE)

    def _experts(self, layer: int) -> Experts:
        stacks = self.layers[layer].stacks
        assert stacks is not None
        return stacks.experts()

    def share(self, of_misses: Sequence[int]) -> None:
        assert self.hybrid.tables is not None
        with torch.cuda.stream(self.stream):
            self.hybrid.tables.share(of_misses)
            self.hybrid.tables.publish()
            self.stream.synchronize()

    def step(self, misses: int) -> torch.cuda.CUDAGraph:
        """A token that chooses `misses` experts of the CPU in each layer, others in each. The doorbell is armed."""
        rng = torch.Generator().manual_seed(misses)
        x = torch.randn(1, SHAPE.hidden, device=DEVICE).bfloat16()
        weights = torch.full((1, TOP_K), 1 / TOP_K, device=DEVICE)
        ids = []
        for _ in self.layers:
            far = torch.randperm(EXPERTS - RESIDENT, generator=rng)[:misses] + RESIDENT
            near = torch.randperm(RESIDENT, generator=rng)[: TOP_K - misses]
            ids.append(torch.cat([far, near])[None].int().to(DEVICE))

        def run() -> None:
            for layer, chosen in zip(self.hybrid.layers, ids, strict=True):
                layer.start(x, Chosen(chosen, weights)).finish(None, None)

        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            run()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                run()
        self._keep = x, weights, ids
        return graph

    def us(self, graph: torch.cuda.CUDAGraph, beside: Callable[[], None] | None = None) -> float:
        """Median time of a step; `beside` is called once it is launched."""
        took = []
        with torch.cuda.stream(self.stream):
            for _ in range(REPLAYS):
                begin = time.perf_counter()
                graph.replay()
                if beside is not None:
                    beside()
                self.stream.synchronize()
                took.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(took[REPLAYS // 4 :])


class Reading:
    """The CPU's workers compute 8 experts of a token again and again, in a thread that is the pool's caller."""

    def __init__(self, model: Model) -> None:
        self.nbytes, self._model, self._end = 0, model, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._begin = time.perf_counter()
        self._thread.start()

    def _run(self) -> None:
        os.sched_setaffinity(0, (self._model.cpu,))
        x, y = torch.zeros(1, SHAPE.hidden).bfloat16(), torch.empty(1, SHAPE.hidden)
        rows = Rows(x.data_ptr(), SHAPE.hidden), Rows(y.data_ptr(), SHAPE.hidden, wide=True)
        weights, rng = np.full(TOP_K, 1 / TOP_K, np.float32), np.random.default_rng(0)
        chosen = [rng.permutation(EXPERTS)[:TOP_K].astype(np.int32) for _ in range(64)]
        for ids, stack in self._turns(chosen):
            moe(
                self._model.pool, stack, *rows, 1,
                ids=ids.ctypes.data, weights=weights.ctypes.data, top_k=TOP_K, lane=1,
            )  # fmt: skip
            self.nbytes += TOP_K * BYTES

    def _turns(self, chosen: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, Experts]]:
        turn = 0
        while not self._end.is_set():
            yield chosen[turn % len(chosen)], self._model.stacks[turn % len(self._model.stacks)]
            turn += 1

    def stop(self) -> float:
        """Bytes per second so far."""
        self._end.set()
        self._thread.join()
        return self.nbytes / (time.perf_counter() - self._begin)


def rates(model: Model) -> None:
    reading = Reading(model)
    time.sleep(1.0)
    print(f"the CPU alone reads {reading.stop() / 1e9:6.1f} GB/s")
    memory = model.layers[0]
    for at_once in range(1, TOP_K + 1):
        read = ReadInPlace(memory, model.spaces, at_once)
        alone = read.read().gpu_bytes_per_s
        reading = Reading(model)
        time.sleep(0.2)
        before, begin = reading.nbytes, time.perf_counter()
        beside = [read.read().gpu_bytes_per_s for _ in range(8)]
        cpu = (reading.nbytes - before) / (time.perf_counter() - begin)
        reading.stop()
        print(
            f"{at_once} experts in place: {alone / 1e9:6.1f} GB/s alone; beside the CPU "
            f"{statistics.median(beside) / 1e9:6.1f}, the CPU {cpu / 1e9:6.1f} GB/s"
        )


def co_fetch(model: Model) -> None:
    for misses in (1, 2, 4, 6, 8):
        model.hybrid.begin()
        graph = model.step(misses)
        for fetched in range(misses + 1):
            model.share([0] * misses + [fetched] + [0] * (TOP_K - misses))
            before = model.hybrid.transport.counters()
            us = model.us(graph) / len(model.layers)
            after = model.hybrid.transport.counters()
            nbytes, took_s = after.weight_bytes - before.weight_bytes, after.moe_s - before.moe_s
            rate = f"the CPU {nbytes / took_s / 1e9:6.1f} GB/s" if took_s else ""
            print(f"{misses} of 8 missing, {fetched} read in place: {us:7.1f} us a layer {rate}")
        model.share([0] * (TOP_K + 1))
        model.hybrid.end()


def copies(model: Model) -> None:
    copier = GpuCopier(DEVICE)
    slots = [
        Slot(
            *(torch.empty(of.panels, of.panel_bytes, dtype=torch.uint8, device=DEVICE) for of in (SHAPE.up, SHAPE.down))
        )
        for _ in range(8)
    ]
    for misses in (0, 2, 4):
        model.hybrid.begin()
        graph = model.step(misses)
        alone = model.us(graph)
        print(f"{misses} of 8 missing: {alone:8.1f} us a step of {len(model.layers)} layers")
        for count in (1, 2, 4, 8):
            turn = 0

            def beside(count: int = count) -> None:
                nonlocal turn
                for slot in slots[:count]:
                    turn += 1
                    memory = model.layers[turn % len(model.layers)]
                    copier.start(slot.parts(*memory.in_place(turn * 7 % EXPERTS)))

            us = model.us(graph, beside)
            begin = time.perf_counter()
            beside()
            host_us = (time.perf_counter() - begin) * 1e6
            copier.close()
            rate = count * BYTES / (time.perf_counter() - begin) / 1e9
            print(
                f"  {count} experts copied beside it: {us:8.1f} us, {us / alone - 1:+.1%}; "
                f"starting them takes {host_us:.0f} us, all {rate:.1f} GB/s"
            )
        model.hybrid.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["rates", "co-fetch", "copies"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) - 2)
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    with Pool([cpus[1 : args.workers + 1]]) as pool:
        os.sched_setaffinity(0, cpus[-1:])
        model = Model(pool, args.layers, cpus[0])
        print(f"{torch.cuda.get_device_name()}, {args.workers} workers and the doorbell's thread, {pool.isa}")
        for name, run in (("rates", rates), ("co-fetch", co_fetch), ("copies", copies)):
            if name in args.what:
                print(f"---- {name}")
                run(model)
        model.hybrid.transport.close()
        model.registered.close()


if __name__ == "__main__":
    main()
