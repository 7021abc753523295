"""What a GPU's doorbell costs: microseconds a layer of push and pull in a CUDA graph, without work on the CPU.

Each line, for each way to ring: a graph of 48 layers for T tokens; medians over replays, and the fastest tenth. The
filler is a kernel that spins on the GPU between push and pull, where a layer's own experts would run.
  nothing      neither push nor pull
  not pending  no pair is the CPU's: push does not ring, pull does not wait
  round trip   every row is the CPU's; it answers at once
Where jobs are copied, "not pending" rings and waits all the same.
Run: python benchmarks/probes/gpu_doorbell.py [--way kernel memops callback] [--filler-us 20] [--hidden 2048]
     [--top-k 8] [--cpu N]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np
import torch

from proa.errors import NativeError
from proa.hybrid.gpu_transport import GpuTransport
from proa.hybrid.ways import WAYS
from proa.native.doorbell import PROBE_LAYER, JobSize, Service
from proa.native.formats import Format, layout
from proa.native.pool import Pool
from proa.native.weights import Activation, Experts, Matrix, Piece
from proa.ops.cuda_device import device_ops

LAYERS, REPLAYS, TOKENS = 48, 300, (1, 4, 32)


def any_experts(hidden: int) -> tuple[Experts, np.ndarray]:
    """Two experts of zeros: the doorbell wants some, the probe's jobs do not use them. And their memory."""
    up, down = layout(Format.BF16, 32, hidden, 0), layout(Format.BF16, hidden, 16, 0)
    memory = np.zeros(2 * (up.matrix_bytes + down.matrix_bytes) + 64, np.uint8)
    at = -(-memory.ctypes.data // 64) * 64
    gate_up = Matrix(up, [Piece(0, at, up.matrix_bytes, 2 * up.matrix_bytes)], 2)
    at += 2 * up.matrix_bytes
    low = Matrix(down, [Piece(0, at, down.matrix_bytes, 2 * down.matrix_bytes)], 2)
    return Experts(gate_up, low, Activation.SILU), memory


def captured(layer: Callable[[], None]) -> torch.cuda.CUDAGraph:
    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(LAYERS):
            layer()
    return graph


def us_a_layer(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    took = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) / LAYERS * 1e6)
    late = sorted(took[REPLAYS // 10 :])  # the first ones warm up
    return late[len(late) // 2], late[len(late) // 10]


def cycles_of(filler_us: float) -> int:
    """For torch.cuda._sleep."""
    if not filler_us:
        return 0
    graph = captured(lambda: torch.cuda._sleep(100_000))
    return int(100_000 * filler_us / us_a_layer(graph)[0])


def measure(transport: GpuTransport, tokens: int, cycles: int) -> dict[str, tuple[float, float]]:
    size, device = transport.size, transport.device
    x = torch.randn(tokens, size.hidden, device=device).bfloat16()
    ids = torch.zeros(tokens, size.top_k, dtype=torch.int32, device=device)
    weights = torch.ones(tokens, size.top_k, device=device)
    mine, up = (torch.full((tokens, size.top_k), at, dtype=torch.int64, device=device) for at in (0, 4096))
    out = torch.empty(tokens, size.hidden, device=device)

    def layer(address: torch.Tensor | None) -> Callable[[], None]:
        def run() -> None:
            if address is not None:
                transport.push(x, ids, weights, address, PROBE_LAYER)
            if cycles:
                torch.cuda._sleep(cycles)
            if address is not None:
                transport.pull(out)

        return run

    kinds = {"nothing": None, "not pending": up, "round trip": mine}
    if not cycles:
        del kinds["nothing"]
    return {name: us_a_layer(captured(layer(address))) for name, address in kinds.items()}


def rows_of(transport: GpuTransport, filler_us: float) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    transport.arm()
    cycles = cycles_of(filler_us)
    for us, spins in ((0.0, 0), (filler_us, cycles)):
        for tokens in TOKENS:
            for kind, (median, best) in measure(transport, tokens, spins).items():
                print(f"filler {us:4.0f} us  T {tokens:3}  {kind:12} {median:7.2f} us a layer ({best:.2f})")
                found.append({"filler_us": us, "tokens": tokens, "kind": kind, "us": median, "best_us": best})
    transport.disarm()
    transport.check()
    transport.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filler-us", type=float, default=20.0)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="of the doorbell's thread")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    experts, _memory = any_experts(args.hidden)
    size = JobSize(max(TOKENS), args.top_k, args.hidden)
    found, device = [], torch.device("cuda")
    with Pool([[]], pin=False) as pool:
        for name in args.way:
            try:
                transport = GpuTransport(
                    pool, [experts], size, device, device_ops(device), Service(cpus=(args.cpu,)), WAYS[name]
                )
                probed_us = transport.probe_us()
            except NativeError as error:
                print(f"{name}: {error}")
                continue
            print(f"{torch.cuda.get_device_name()}, {name}, probe at start: {probed_us:.2f} us a round trip")
            found += [{"way": name, **row} for row in rows_of(transport, args.filler_us)]
    print(json.dumps({"hidden": args.hidden, "top_k": args.top_k, "layers": LAYERS, "rows": found}))


if __name__ == "__main__":
    main()
