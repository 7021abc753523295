"""Layers of small experts and random jobs for tests of the doorbell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packing import Packed, random_weights
from proa.native.doorbell import JobSize
from proa.native.formats import Format
from proa.native.pool import Pool
from proa.native.weights import Activation, Experts, Rows, moe

EXPERTS, WIDTH = 6, 48


class Layer:
    """Random experts in bfloat16; those in `poisoned` give NaN."""

    def __init__(self, hidden: int, seed: int, poisoned: tuple[int, ...] = ()) -> None:
        make = [
            [random_weights(Format.BF16, 0, rows, columns, seed=100 * seed + 3 * e + i) for e in range(EXPERTS)]
            for i, (rows, columns) in enumerate([(WIDTH, hidden), (WIDTH, hidden), (hidden, WIDTH)])
        ]
        for expert in poisoned:
            make[2][expert].arrays["codes"][0, 0] = 0x7FC0
        self._packed = Packed(make[0], 1, make[1]), Packed(make[2], 1)
        self.experts = Experts(self._packed[0].matrix, self._packed[1].matrix, Activation.SILU)


@dataclass
class Job:
    x: Tensor  # bfloat16 [T, hidden]
    ids: Tensor  # int64 [T, k], some -1
    weights: Tensor  # float32 [T, k]
    up_address: Tensor  # int64 [T, k]: not 0 where the pair is the GPU's

    def theirs(self) -> Tensor:
        """int32: ids of pairs on the CPU, -1 elsewhere."""
        return self.ids.where((self.ids >= 0) & (self.up_address == 0), -1).int()

    def exact(self, pool: Pool, layer: Layer) -> Tensor:
        """The result of the experts for the CPU's pairs, called directly."""
        y, ids = torch.full(self.x.shape, torch.nan), self.theirs()
        rows, out = Rows(self.x.data_ptr(), self.x.shape[1]), Rows(y.data_ptr(), y.shape[1], True)
        at = {"ids": ids.data_ptr(), "weights": self.weights.data_ptr()}
        moe(pool, layer.experts, rows, out, len(self.x), top_k=ids.shape[1], **at)
        return y

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x.to(device), self.ids.to(device), self.weights.to(device), self.up_address.to(device)


def random_job(rng: torch.Generator, tokens: int, size: JobSize, resident: float = 0.4) -> Job:
    """A random job: a pair has no expert with probability 1/8, and is on the GPU with probability `resident`."""
    order = torch.rand(tokens, EXPERTS, generator=rng).argsort(1)[:, : size.top_k]
    unused = torch.rand(tokens, size.top_k, generator=rng) < 0.125
    up = torch.rand(tokens, size.top_k, generator=rng) < resident
    return Job(
        torch.randn(tokens, size.hidden, generator=rng).bfloat16(),
        order.masked_fill(unused, -1).contiguous(),
        torch.randn(tokens, size.top_k, generator=rng),
        up.long() * 4096,
    )
