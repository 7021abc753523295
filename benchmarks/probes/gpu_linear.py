"""How near linear layers in a checkpoint's own format come to memory's speed. Needs a GPU and the native library.

Everything runs in CUDA graphs over several copies of the weights, so that L2 does not flatter. The share is bytes of
packed weights over the time, by the rate at which this GPU copies (read and written) in the same run; "of bf16" is
the time of the same map in bfloat16 over this one's. Codes are random, scales are numbers.
Run: PYTHONPATH=src python benchmarks/probes/gpu_linear.py [--sweep] [--format q4-k]... [--tokens 1,16]
     [--size 5120x2048]...
--sweep: other tiles and other numbers of programs instead, and which are fastest; name a format, or it takes an hour.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from gpu_experts import DEVICE, FORMS, copy_rate, microseconds, random_panels
from torch import Tensor

from proa.native.formats import BF16_FORM, Form, Layout, layout
from proa.ops.sizes import LINEAR_ROWS
from proa.ops.triton import linear, linear_packed
from proa.ops.triton.linear_packed import MOST_PROGRAMS, Tile, partial_floats
from proa.ops.triton.unpack import unpack

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
SIZES = ((5120, 2048), (2048, 4096), (512, 2048), (1536, 2048), (151936, 2048))  # q, k, v; o; v alone; gate, up; head
MOST_HEAD_TOKENS = 64
LEAST_BY_ROWS = 64


class Case:
    """A map in a format, over enough copies of its weights."""

    def __init__(self, form: Form, rows: int, columns: int) -> None:
        self.of: Layout = layout(form.format, rows, columns, form.group)
        copies = max(3, min(200, (1 << 30) // self.of.matrix_bytes))
        self.panels = [random_panels(self.of, 1) for _ in range(copies)]
        self.arrived = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=DEVICE)

    def us(self, tokens: int) -> float:
        x = torch.randn(tokens, self.of.columns, device=DEVICE).bfloat16()
        out = torch.empty(tokens, self.of.rows, dtype=torch.bfloat16, device=DEVICE)
        partial = torch.empty(partial_floats(tokens, self.of), device=DEVICE)
        call = linear_packed.linear_packed
        return microseconds([lambda p=p: call(x, p, self.of, None, out, partial, self.arrived) for p in self.panels])

    def by_rows_us(self, tokens: int) -> float:
        """Panels become rows of bfloat16 first, which a library multiplies with."""
        x = torch.randn(tokens, self.of.columns, device=DEVICE).bfloat16()
        out = torch.empty(tokens, self.of.rows, dtype=torch.bfloat16, device=DEVICE)
        rows = torch.empty(self.of.rows, self.of.columns, dtype=torch.bfloat16, device=DEVICE)

        def call(panels: Tensor) -> None:
            unpack(panels, self.of, rows)
            torch.mm(x, rows.T, out=out)

        return microseconds([lambda p=p: call(p) for p in self.panels])


def bf16_us(rows: int, columns: int, tokens: int) -> float:
    """As the engine runs it: Triton for few rows of x, cuBLAS for more."""
    copies = max(3, min(200, (1 << 30) // (rows * columns * 2)))
    weights = [torch.randn(rows, columns, device=DEVICE).bfloat16() for _ in range(copies)]
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)

    def call(weight: Tensor) -> None:
        if tokens <= LINEAR_ROWS:
            linear.linear(x, weight, None, out)
        else:
            torch.mm(x, weight.T, out=out)

    return microseconds([lambda w=w: call(w) for w in weights])


def row(name: str, us: float, of: Layout, tokens: int, copy: float, plain_us: float | None = None) -> None:
    rate, flops = of.matrix_bytes / us / 1e3, 2 * tokens * of.rows * of.columns / us / 1e6
    beside = "" if plain_us is None else f" {plain_us / us:5.2f} of bf16"
    print(f"{name:52} {us:8.1f} us {rate:6.0f} GB/s {rate / copy:5.0%} {flops:7.1f} TFLOP/s{beside}", flush=True)


def time_all(copy: float, forms: Sequence[str], sizes: Sequence[tuple[int, int]], all_tokens: Sequence[int]) -> None:
    for rows, columns in sizes:
        tokens_of = [t for t in all_tokens if rows < 65536 or t <= MOST_HEAD_TOKENS]
        plain = {tokens: bf16_us(rows, columns, tokens) for tokens in tokens_of}
        for tokens, us in plain.items():
            row(f"{rows} x {columns}, {tokens} rows, bf16", us, layout(BF16_FORM.format, rows, columns), tokens, copy)
        for name in forms:
            case = Case(FORMS[name], rows, columns)
            for tokens in tokens_of:
                row(f"{rows} x {columns}, {tokens} rows, {name}", case.us(tokens), case.of, tokens, copy, plain[tokens])
                if tokens >= LEAST_BY_ROWS:
                    row("    by rows of bfloat16", case.by_rows_us(tokens), case.of, tokens, copy, plain[tokens])


def sweep(copy: float, forms: Sequence[str], sizes: Sequence[tuple[int, int]], all_tokens: Sequence[int]) -> None:
    """Panels, lines, stages, warps, programs."""
    chosen = linear_packed._tile
    one = itertools.product((1, 2), (32, 64, 128), (3, 4), (2, 4, 8), (1, MOST_PROGRAMS))
    few = itertools.product((2, 4, 8), (32, 64, 128), (3, 4), (4, 8), (1, MOST_PROGRAMS))
    many = itertools.product((4, 8, 16), (32, 64), (3, 4), (4, 8), (1, 198))
    tiles = {1: list(one), 16: list(few), 128: list(many)}
    for (rows, columns), name, tokens in itertools.product(sizes, forms, all_tokens):
        case, found = Case(FORMS[name], rows, columns), {}
        usual = chosen(tokens, case.of)
        kind = 1 if tokens == 1 else 16 if tokens <= 32 else 128
        for panels, lines, stages, warps, programs in tiles[kind]:
            if tokens == 1 and lines >= warps * 32:
                continue
            tile = replace(usual, panels=panels, lines=lines, stages=stages, warps=warps, programs=programs)
            linear_packed._tile = lambda *_, tile=tile: tile
            try:
                found[tile] = case.us(tokens)
            except triton.runtime.OutOfResources:
                continue
        linear_packed._tile = chosen
        told(f"{rows} x {columns}, {tokens} rows, {name}", case, found, usual, tokens, copy)


def told(name: str, case: Case, found: dict[Tile, float], usual: Tile, tokens: int, copy: float) -> None:
    row(f"{name}: as chosen", case.us(tokens), case.of, tokens, copy)
    for tile in sorted(found, key=lambda tile: found[tile])[:3]:
        what = f"{tile.panels},{tile.lines},{tile.stages},{tile.warps},{tile.programs}"
        row(f"    {what}", found[tile], case.of, tokens, copy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--format", action="append", choices=list(FORMS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--size", action="append")
    asked = parser.parse_args()
    torch.manual_seed(1)
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copies at {copy:.0f} GB/s, read and written")
    forms = asked.format or [name for name in FORMS if name != "bf16"]
    sizes = [tuple(map(int, size.split("x"))) for size in asked.size or ()] or list(SIZES)
    tokens = [int(word) for word in asked.tokens.split(",")]
    (sweep if asked.sweep else time_all)(copy, forms, sizes, tokens)


if __name__ == "__main__":
    main()
