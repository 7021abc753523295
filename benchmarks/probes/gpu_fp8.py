"""Experts' FP8 products with FP8 weights (--fp8-activations) beside weight-only ones. Needs a GPU that multiplies FP8,
and the native library.

Everything runs in CUDA graphs over several layers, so that L2 does not flatter. "rounding" is what making the rows
takes, and is part of "fp8", which is timed where it is not taken in service, too.
Run: PYTHONPATH=src python benchmarks/probes/gpu_fp8.py [experts] [sweep] [--format fp8-panel|fp8-row]...
     [--tokens 256,512]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
import triton
from gpu_experts import (
    CAPABILITY,
    DEVICE,
    EXPERTS,
    FORMS,
    LAYERS,
    TOP_K,
    Case,
    Layer,
    Routing,
    copy_rate,
)

from proa.ops.residency import ExpertShape
from proa.ops.triton import experts as launcher
from proa.ops.triton import experts_fp8
from proa.ops.triton.experts import ExpertSpace, expert_space, experts
from proa.ops.triton.fp8_rows import round_rows

TOKENS = (256, 512, 1024, 4096)
NAMES = ("fp8-panel", "fp8-row")


def line(name: str, times: dict[str, float], flops: float) -> None:
    shown = "  ".join(f"{what} {us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s" for what, us in times.items())
    print(f"{name:32} {shown}", flush=True)


class Experts(Case):
    """A batch in each of several layers, with room to round."""

    def __init__(self, layers: Sequence[Layer], tokens: int) -> None:
        super().__init__(layers, tokens)
        self.rounding = expert_space(
            tokens, TOP_K, EXPERTS, self.shape, DEVICE, fp8=True, capability=CAPABILITY
        )

    def us(self, space: ExpertSpace) -> float:
        def call(routing: Routing) -> None:
            experts(self.x, routing.at, self.shape, space)

        return self.each(call)

    def rounding_us(self) -> float:
        """Time of rounding the rows before gate and up, and before down."""
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
            size = experts_fp8.fp8_block_tokens(tokens * TOP_K, EXPERTS)
            taken = "" if experts_fp8.pays(tokens * TOP_K, EXPERTS) else ", not taken"
            line(f"{tokens} tokens by {size}, {name}{taken}", times, case.flops)


def sweep(names: Sequence[str], all_tokens: Sequence[int]) -> None:
    """Panels, stages, warps."""
    tiles = list(itertools.product((4, 8, 16), (2, 3, 4), (4, 8)))
    usual = experts_fp8._PANELS, experts_fp8._STAGES, experts_fp8._warps
    for name, tokens in itertools.product(names, all_tokens):
        case, found = Experts(layers_of(name), tokens), {}
        for tile in tiles:
            experts_fp8._PANELS, experts_fp8._STAGES, warps = tile
            experts_fp8._warps = lambda _, warps=warps: warps
            try:
                found[tile] = case.us(case.rounding)
            except triton.runtime.OutOfResources:
                continue
        experts_fp8._PANELS, experts_fp8._STAGES, experts_fp8._warps = usual
        best = dict(sorted(found.items(), key=lambda item: item[1])[:4])
        us = case.us(case.rounding)
        print(f"experts, {tokens} tokens, {name}: {us:.1f} us as chosen; panels, stages, warps: {best}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["experts"])
    parser.add_argument("--format", action="append", choices=NAMES)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    asked = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, copy {copy_rate():.0f} GB/s read and written")
    names, tokens = asked.format or list(NAMES), [int(word) for word in asked.tokens.split(",")]
    launcher.pays = lambda *_: True
    for part, run in (("experts", time_experts), ("sweep", sweep)):
        if part in asked.what:
            run(names, tokens)


if __name__ == "__main__":
    main()
