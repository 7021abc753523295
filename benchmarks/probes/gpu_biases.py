"""What biases and the clamped SwiGLU of gpt-oss cost in the GPU's experts, and how near those come to memory's speed.
Needs a GPU and the native library.

Shapes of gpt-oss-120b: 128 experts of 2880 and 2880, top 4. The share is bytes of weights over the time, by the rate at
which this GPU copies (read and written) in the same run.
Run: PYTHONPATH=src python benchmarks/probes/gpu_biases.py [--format mxfp4] [--tokens 1 4 64]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from gpu_experts import DEVICE, FORMS, copy_rate, microseconds, random_panels
from torch import Tensor

from proa.native.formats import PANEL_ROWS, Form
from proa.native.weights import Activation
from proa.ops.residency import Biases, ExpertShape, Located
from proa.ops.triton.experts import expert_space, experts

EXPERTS, TOP_K, HIDDEN, LAYERS = 128, 4, 2880, 3
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)


class Layer:
    """Random bytes in the packed layout, and biases of any size."""

    def __init__(self, form: Form) -> None:
        self.plain = ExpertShape(HIDDEN, HIDDEN, form, form)
        self.memory = [random_panels(of, EXPERTS) for of in (self.plain.up, self.plain.down)]
        rows = (of.panels * PANEL_ROWS for of in (self.plain.up, self.plain.down))
        self.biases = Biases(*(torch.randn(EXPERTS, n, device=DEVICE) for n in rows))

    def located(self, ids: Tensor) -> Located:
        sizes = self.plain.up.matrix_bytes, self.plain.down.matrix_bytes
        places = (m.data_ptr() + ids * n for m, n in zip(self.memory, sizes, strict=True))
        return Located(ids.int(), *places, torch.full_like(ids, -1, dtype=torch.int32))


def measure(layers: Sequence[Layer], tokens: int, copy: float) -> None:
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    chosen = [torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices for _ in layers]
    at = [layer.located(ids) for layer, ids in zip(layers, chosen, strict=True)]
    plain = layers[0].plain
    clamped = ExpertShape(HIDDEN, HIDDEN, plain.up_form, plain.down_form, Activation.CLAMPED_SWIGLU, 7.0)
    space = expert_space(tokens, TOP_K, EXPERTS, plain, DEVICE)
    distinct = sum(len(ids.unique()) for ids in chosen) / len(layers)
    nbytes = distinct * (plain.up.matrix_bytes + plain.down.matrix_bytes)
    times = []
    for shape, biased in ((plain, False), (clamped, False), (clamped, True)):
        calls = [
            lambda of=of, layer=layer, shape=shape, biased=biased: experts(
                x, of, shape, space, layer.biases if biased else None
            )
            for of, layer in zip(at, layers, strict=True)
        ]
        times.append(microseconds(calls))
    rate = nbytes / times[-1] / 1e3
    print(
        f"{tokens:5} tokens: SiLU {times[0]:8.1f} us, clamped {times[1]:8.1f}, with biases {times[2]:8.1f} "
        f"({times[2] / times[0] - 1:+.1%}), {rate:6.0f} GB/s, {rate / copy:.0%} of the copy", flush=True,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", action="append", choices=[*FORMS], help="of experts; may be repeated")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    asked = parser.parse_args(arguments)
    torch.manual_seed(1)
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copies at {copy:.0f} GB/s, read and written")
    for name in asked.format or ("bf16", "mxfp4"):
        print(f"experts of gpt-oss-120b in {name}:")
        layers = [Layer(FORMS[name]) for _ in range(LAYERS)]
        for tokens in asked.tokens:
            measure(layers, tokens, copy)


if __name__ == "__main__":
    main(sys.argv[1:])
