"""FP8 products with FP8 weights (--fp8-activations) beside weight-only ones. Needs a GPU that multiplies FP8, and the
native library.

Everything runs in CUDA graphs over several copies of the weights, so that L2 does not flatter. "rounding" is what
making the rows takes, and is part of "fp8". For linear layers also bfloat16 by cuBLAS, and torch._scaled_mm by row,
which needs weights as rows: a limit to compare with, without rounding.
Run: PYTHONPATH=src python benchmarks/probes/gpu_fp8.py [linear] [experts] [sweep] [--format fp8-panel|fp8-row]...
     [--tokens 64,128]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
import triton
from gpu_experts import (
    DEVICE,
    EXPERTS,
    FORMS,
    LAYERS,
    TOP_K,
    Case,
    Layer,
    Routing,
    copy_rate,
    microseconds,
    random_panels,
)
from gpu_linear import bf16_us
from torch import Tensor

from proa.native.formats import Form, layout
from proa.ops.cuda_linear import PackedMatrix
from proa.ops.residency import ExpertShape
from proa.ops.triton import experts_fp8, linear_fp8
from proa.ops.triton.experts import ExpertSpace, expert_space, experts
from proa.ops.triton.experts_grouped import block_tokens
from proa.ops.triton.fp8_rows import fp8_rows, round_rows

TOKENS = (32, 64, 128, 256, 512, 1024, 4096)
SIZES = ((5120, 2048), (2048, 4096), (1536, 2048), (7168, 4096))
NAMES = ("fp8-panel", "fp8-row")


def line(name: str, times: dict[str, float], flops: float) -> None:
    shown = "  ".join(f"{what} {us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s" for what, us in times.items())
    print(f"{name:32} {shown}", flush=True)


class Linear:
    """A map, over enough copies of its weights."""

    def __init__(self, form: Form, rows: int, columns: int) -> None:
        self.of = layout(form.format, rows, columns, form.group)
        copies = max(3, min(100, (1 << 30) // self.of.matrix_bytes))
        self.maps = {fp8: [PackedMatrix(self.of, DEVICE, fp8=fp8) for _ in range(copies)] for fp8 in (False, True)}
        for exact, rounds in zip(self.maps[False], self.maps[True], strict=True):
            exact.panels.copy_(random_panels(self.of, 1))
            rounds.panels = exact.panels

    def us(self, x: Tensor, fp8: bool) -> float:
        out = torch.empty(len(x), self.of.rows, dtype=torch.bfloat16, device=DEVICE)
        return microseconds([lambda m=m: m.into(x, None, out) for m in self.maps[fp8]])

    def rounding_us(self, x: Tensor) -> float:
        to = fp8_rows(len(x), self.of, DEVICE)
        return microseconds([lambda: round_rows(x, to)] * 20)


def scaled_mm_us(rows: int, columns: int, tokens: int) -> float:
    """By a library: a scale of each row of both."""
    copies = max(3, min(100, (1 << 30) // (rows * columns)))
    weights = [torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(copies)]
    x = torch.randn(tokens, columns, device=DEVICE).to(torch.float8_e4m3fn)
    of_x, of_w = torch.ones(tokens, 1, device=DEVICE), torch.ones(1, rows, device=DEVICE)

    def call(weight: Tensor) -> None:
        torch._scaled_mm(x, weight.T, of_x, of_w, out_dtype=torch.bfloat16)

    return microseconds([lambda w=w: call(w) for w in weights])


def time_linear(names: Sequence[str], all_tokens: Sequence[int]) -> None:
    for (rows, columns), name in itertools.product(SIZES, names):
        case = Linear(FORMS[name], rows, columns)
        for tokens in all_tokens:
            x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
            times = {"weight-only": case.us(x, fp8=False), "fp8": case.us(x, fp8=True)}
            times |= {"rounding": case.rounding_us(x), "bf16": bf16_us(rows, columns, tokens)}
            times["scaled_mm"] = scaled_mm_us(rows, columns, tokens)
            line(f"{rows} x {columns}, {tokens} rows, {name}", times, 2 * tokens * rows * columns)


class Experts(Case):
    """A batch in each of several layers, with room to round."""

    def __init__(self, layers: Sequence[Layer], tokens: int) -> None:
        super().__init__(layers, tokens)
        self.rounding = expert_space(tokens, TOP_K, EXPERTS, self.shape, DEVICE, fp8=True)

    def us(self, space: ExpertSpace) -> float:
        def call(routing: Routing) -> None:
            experts(self.x, routing.at, self.shape, space)

        return self.each(call)

    def rounding_us(self) -> float:
        """Of rows before gate and up, and before down."""
        fp8 = self.rounding.fp8
        assert fp8 is not None
        assert fp8.x is not None
        assert fp8.h is not None
        x, h, of = fp8.x, fp8.h, self.shape
        self.rounding.h.normal_()

        def call(_: Routing) -> None:
            round_rows(self.x, x)
            round_rows(self.rounding.h[:, : of.width], h)

        return self.each(call)


def layers_of(name: str) -> list[Layer]:
    return [Layer(ExpertShape(2048, 768, FORMS[name], FORMS[name])) for _ in range(LAYERS)]


def time_experts(names: Sequence[str], all_tokens: Sequence[int]) -> None:
    for name in names:
        layers = layers_of(name)
        for tokens in all_tokens:
            case = Experts(layers, tokens)
            times = {"weight-only": case.us(case.space), "fp8": case.us(case.rounding), "rounding": case.rounding_us()}
            size = block_tokens(tokens * TOP_K, EXPERTS)
            line(f"experts, {tokens} tokens by {size}, {name}", times, case.flops)


def sweep(names: Sequence[str], all_tokens: Sequence[int]) -> None:
    """Panels, stages, warps."""
    tiles = list(itertools.product((4, 8, 16), (2, 3, 4), (4, 8)))
    usual, usual_tile = experts_fp8._tile, linear_fp8._tile
    for name, tokens in itertools.product(names, all_tokens):
        case, found = Experts(layers_of(name), tokens), {}
        for tile in tiles:
            experts_fp8._tile = lambda _, tile=tile: experts_fp8._Tile(*tile)
            try:
                found[tile] = case.us(case.rounding)
            except triton.runtime.OutOfResources:
                continue
        experts_fp8._tile = usual
        best = dict(sorted(found.items(), key=lambda item: item[1])[:4])
        us = case.us(case.rounding)
        print(f"experts, {tokens} tokens, {name}: {us:.1f} us as chosen; panels, stages, warps: {best}")
        linear, found = Linear(FORMS[name], 5120, 2048), {}
        x = torch.randn(tokens, 2048, device=DEVICE).bfloat16()
        for size, tile in itertools.product((64, 128), tiles):
            linear_fp8._tile = lambda *_, size=size, tile=tile: linear_fp8.Tile(size, *tile)
            try:
                found[size, *tile] = linear.us(x, fp8=True)
            except triton.runtime.OutOfResources:
                continue
        linear_fp8._tile = usual_tile
        best = dict(sorted(found.items(), key=lambda item: item[1])[:4])
        us = linear.us(x, fp8=True)
        print(f"5120 x 2048, {tokens} rows, {name}: {us:.1f} us as chosen; rows, panels, stages, warps: {best}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["linear", "experts"])
    parser.add_argument("--format", action="append", choices=NAMES)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    asked = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, copy {copy_rate():.0f} GB/s read and written")
    names, tokens = asked.format or list(NAMES), [int(word) for word in asked.tokens.split(",")]
    for part, run in (("linear", time_linear), ("experts", time_experts), ("sweep", sweep)):
        if part in asked.what:
            run(names, tokens)


if __name__ == "__main__":
    main()
