"""How near the GPU's gated delta rule comes to its bandwidth, and what a token of a prompt costs. Needs a CUDA device.

Shapes of Qwen3-Next-80B. Every time is that of a launch inside a CUDA graph. Decode moves each sequence's state once in
and once out; layers take turns, so that states do not stay in the second-level cache. Bandwidth: of a plain copy.
Run: python benchmarks/probes/gpu_delta.py [--sweep]   --sweep also tries other numbers of columns a program.
"""

from __future__ import annotations

import sys

import torch
from gpu_attention import copy_bandwidth, microseconds
from torch import Tensor

from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch, RecurrentState
from proa.ops.triton import delta

GROUPS, MEMBERS, DIM, TAPS, LAYERS = 16, 2, 128, 4, 36
HEADS, CHANNELS = GROUPS * MEMBERS, (2 + MEMBERS) * GROUPS * DIM
STATE_BYTES = 4 * HEADS * DIM * DIM
MOST_BYTES = 4 << 30  # of states


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

    @staticmethod
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    def run(self) -> None:
        delta.gated_delta(self.x, self.weights, self.state, self.at, self.slots, self.mixed, self.seen, self.out)


def decode(bandwidth: float) -> None:
    for sequences in (1, 4, 8, 32):
        layers = [Layer(sequences, 1) for _ in range(min(LAYERS, max(1, MOST_BYTES // (sequences * STATE_BYTES))))]
        time = microseconds([layer.run for layer in layers])
        least = 2 * sequences * STATE_BYTES / bandwidth
        print(f"decode, {sequences} sequences: {time:.1f} us a layer, states alone {least:.1f} us ({least / time:.0%})")


def prefill() -> None:
    for rows in (64, 512, 2048, 8192):
        time = microseconds([Layer(1, rows).run])
        print(f"prefill, {rows} rows: {time:.0f} us a layer, {1000 * time / rows:.0f} ns a row; "
              f"{rows / (time * LAYERS) * 1e6:.0f} rows/s through {LAYERS} layers")  # fmt: skip


def main() -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e6:.2f} TB/s")
    for columns in (4, 8, 16, 32) if "--sweep" in sys.argv else (delta.COLUMNS,):
        delta.COLUMNS = columns
        print(f"{columns} columns of a state a program")
        decode(bandwidth)
        prefill()


if __name__ == "__main__":
    main()
