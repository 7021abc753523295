"""How near the GPU's gated delta rule comes to its bandwidth; what prompts cost, by tokens and by chunks. Needs a GPU.

Shapes of Qwen3-Next-80B. Every time is that of a launch inside a CUDA graph. Decode moves each sequence's state once in
and once out; layers take turns, so that states do not stay in the second-level cache. Bandwidth: of a plain copy.
TFLOP/s of chunks count every product that is computed, three of bfloat16 for one of the rule.
Run: python benchmarks/probes/gpu_delta.py [--sweep]   --sweep also tries other shapes of both forms.
"""

from __future__ import annotations

import sys

import torch
from gpu_attention import copy_bandwidth, microseconds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from proa.ops.caches import RecurrentState
from proa.ops.gpu_traits import traits_of
from proa.ops.sizes import DELTA_CHUNK as CHUNK
from proa.ops.sizes import delta_chunk_floats
from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch
from proa.ops.triton import delta
from proa.ops.triton.delta_chunks import Chunks, ChunkTile, shape_for

GROUPS, MEMBERS, DIM, TAPS, LAYERS = 16, 2, 128, 4, 36
HEADS, CHANNELS = GROUPS * MEMBERS, (2 + MEMBERS) * GROUPS * DIM
STATE_BYTES = 4 * HEADS * DIM * DIM
MOST_BYTES = 4 << 30  # of states
# Of a row and head: three products with the state; two among keys and queries, two with updates, four to invert.
FLOPS = 3 * 2 * HEADS * (3 * DIM * DIM + 4 * CHUNK * DIM + 4 * CHUNK * CHUNK)


class Layer:
    """Inputs, weights and states of `sequences` with `rows` rows each."""

    def __init__(self, sequences: int, rows: int) -> None:
        total = sequences * rows
        projected = torch.randn(total, GROUPS, (2 + 2 * MEMBERS) * DIM, device="cuda", dtype=torch.bfloat16)
        gates = torch.randn(total, GROUPS, 2 * MEMBERS, device="cuda", dtype=torch.bfloat16)
        q, k, v, z = torch.split(projected, [DIM, DIM, MEMBERS * DIM, MEMBERS * DIM], -1)
        b, a = gates.chunk(2, -1)
        self.x = DeltaInputs(q, k, *(t.view(total, GROUPS, MEMBERS, DIM) for t in (v, z)), b, a)
        self.weights = DeltaWeights(
            self.numbers(CHANNELS, 1, TAPS),
            self.numbers(HEADS),
            self.numbers(HEADS),
            self.numbers(DIM).bfloat16(),
            1e-6,
        )
        self.state = RecurrentState(
            self.numbers(sequences, HEADS, DIM, DIM), self.numbers(sequences, TAPS - 1, CHANNELS).bfloat16()
        )
        starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * rows
        lens = torch.full((sequences,), rows + 100, dtype=torch.int32, device="cuda")
        states = torch.arange(sequences, dtype=torch.int32, device="cuda")
        self.at = DeviceBatch(rows == 1, starts, lens, states.view(-1, 1), states)
        self.slots = torch.arange(total, device="cuda")
        self.mixed, self.seen = self.numbers(total, CHANNELS), self.numbers(total, HEADS, DIM)
        self.out = torch.empty(total, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        self.space = self.numbers(delta_chunk_floats(total, HEADS))

    @staticmethod
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    def run(self, shape: ChunkTile | None = None) -> None:
        """By chunks where there is a shape."""
        chunks = None if shape is None else Chunks(shape, self.space)
        space = delta.DeltaSpace(self.mixed, self.seen, chunks)
        delta.gated_delta(self.x, self.weights, self.state, self.at, self.slots, space, self.out)


def decode(bandwidth: float) -> None:
    for sequences in (1, 4, 8, 32):
        layers = [Layer(sequences, 1) for _ in range(min(LAYERS, max(1, MOST_BYTES // (sequences * STATE_BYTES))))]
        time = microseconds([layer.run for layer in layers])
        least = 2 * sequences * STATE_BYTES / bandwidth
        print(f"decode, {sequences} sequences: {time:.1f} us a layer, states alone {least:.1f} us ({least / time:.0%})")


def said(time: float, rows: int) -> str:
    return f"{time:.0f} us a layer, {rows / (time * LAYERS) * 1e6:.0f} rows/s through {LAYERS} layers"


def prefill(shape: ChunkTile) -> None:
    alone = [(1, rows) for rows in (512, 1024, 2048, 4096, 8192, 16384, 32768)]
    for sequences, rows in (*alone, (4, 512), (4, 2048)):
        layer, total = Layer(sequences, rows), sequences * rows
        time = microseconds([lambda: layer.run(shape)])  # noqa: B023
        text = f"prefill, {sequences} x {rows}: by chunks {said(time, total)}, {FLOPS * total / time / 1e6:.0f} TFLOP/s"
        if rows <= 8192:
            slow = microseconds([layer.run])
            text += f"; token by token {said(slow, total)}, {slow / time:.1f} times as long"
        print(text, flush=True)


def few(shape: ChunkTile) -> None:
    """From how many rows on chunks are faster: delta.FEW_ROWS."""
    chosen, delta.FEW_ROWS = delta.FEW_ROWS, 4
    for sequences in (1, 4):
        for rows in (8, 16, 24, 32, 48, 64, 128):
            layer = Layer(sequences, rows)
            chunks, tokens = microseconds([lambda: layer.run(shape)]), microseconds([layer.run])  # noqa: B023
            print(f"short, {sequences} x {rows}: by chunks {chunks:.1f} us, token by token {tokens:.1f} us")
    delta.FEW_ROWS = chosen


def kernels(shape: ChunkTile) -> None:
    for rows in (512, 8192):
        layer = Layer(1, rows)
        layer.run(shape)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                layer.run(shape)
            torch.cuda.synchronize()
        parts = sorted(((e.key, e.device_time) for e in seen.key_averages()), key=lambda part: -part[1])
        print(f"kernels of {rows} rows:", ", ".join(f"{name} {time:.0f} us" for name, time in parts if time >= 1))


def agreement(shape: ChunkTile) -> None:
    """Print how far apart both forms are after a prompt, relative to their lengths."""
    layer = Layer(1, 4096)
    before, found = [t.clone() for t in (layer.state.rule, layer.state.tail)], []
    for form in (None, shape):
        for now, then in zip((layer.state.rule, layer.state.tail), before, strict=True):
            now.copy_(then)
        layer.run(form)
        found.append((layer.seen.clone(), layer.state.rule.clone()))
    for name, tokens, chunks in zip(("outputs", "states"), *found, strict=True):
        print(f"both forms, {name}: {((tokens - chunks).norm() / tokens.norm()).item():.2g} apart")


def sweep() -> None:
    layers = {f"{count} x {rows}": Layer(count, rows) for count, rows in ((1, 512), (1, 8192), (4, 2048))}
    for shape in (ChunkTile(c, w, s) for c in (16, 32, 64) for w in (4, 8) for s in (1, 2)):
        try:
            times = {rows: microseconds([lambda: layer.run(shape)]) for rows, layer in layers.items()}  # noqa: B023
        except Exception as error:  # noqa: BLE001 - too much shared memory, say
            print(f"sweep {shape}: {type(error).__name__}")
            continue
        print(f"sweep {shape}:", ", ".join(f"{rows} rows {time:.0f} us" for rows, time in times.items()), flush=True)


def main() -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e6:.2f} TB/s")
    traits = traits_of(torch.device("cuda"))
    shape = shape_for(traits.capability, traits.shared_bytes)
    for columns in ((n, n) for n in (8, 16, 32)) if "--sweep" in sys.argv else (delta.COLUMNS,):
        delta.COLUMNS = columns
        print(f"{columns} columns of a state a program")
        decode(bandwidth)
    if shape is None:
        print("this GPU goes token by token")
        return
    agreement(shape)
    few(shape)
    prefill(shape)
    kernels(shape)
    if "--sweep" in sys.argv:
        sweep()


if __name__ == "__main__":
    main()
