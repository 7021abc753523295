"""A layer of packed experts and its routing, for the tests of Triton's expert kernels. Never: tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ops.triton_bounds import poisoned
from packing import Packed, random_weights
from proa.ops.gpu_traits import traits_of
from proa.ops.residency import Biases, ExpertShape, Located, PairBias


def capability_of(device: torch.device) -> int:
    """The device's compute capability, for which tiles are chosen; 0 without a GPU."""
    return traits_of(device).capability if device.type == "cuda" else 0


class Layer:
    """Packed experts; those in `absent` are not readable by the GPU."""

    def __init__(
        self, count: int, shape: ExpertShape, device: torch.device, absent: tuple[int, ...] = (), seed: int = 1,
        biased: bool = False,
    ) -> None:  # fmt: skip
        self.count, self.shape, self.device = count, shape, device
        sizes = ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width))
        parts = [
            [random_weights(*form, *size, seed=seed + 1000 * i + e) for e in range(count)]
            for i, (size, form) in enumerate(zip(sizes, (shape.up_form, shape.up_form, shape.down_form), strict=True))
        ]
        self.gate, self.up, self.down = (torch.from_numpy(np.stack([w.values for w in part])) for part in parts)
        self.scaled = [torch.from_numpy(np.stack([w.scaled for w in part])) for part in parts]
        packed = Packed(parts[0], paired=parts[1]), Packed(parts[2])
        self._memory = packed  # on a CPU the kernels read this memory itself
        self.packed = [torch.frombuffer(p.memory, dtype=torch.uint8).to(device) for p in packed]
        assert [p.layout.panel_bytes for p in packed] == [shape.up.panel_bytes, shape.down.panel_bytes]
        tables = [b.data_ptr() + torch.arange(count) * p.layout.matrix_bytes for b, p in zip(self.packed, packed)]  # noqa: B905
        for table in tables:
            table[list(absent)] = 0
        self.up_table, self.down_table = (table.to(device) for table in tables)
        rng = torch.Generator().manual_seed(seed)
        biases = [torch.randn(count, n, generator=rng) * biased for n in (shape.width, shape.width, shape.hidden)]
        self.gate_bias, self.up_bias, self.down_bias = (bias.double().to(device) for bias in biases)
        self.biases = _packed_biases(*biases, shape, device) if biased else None

    def pair_biases(self, ids: Tensor) -> list[PairBias | None]:
        """Biases of gate and up, and of down, as arguments of the launchers."""
        biases = self.biases
        return [None, None] if biases is None else [PairBias(ids, of) for of in (biases.up, biases.down)]

    def routing(self, ids: Tensor, rng: torch.Generator) -> Routing:
        """Routing as the router would write it; ids of -1 are padding."""
        weights = torch.where(ids < 0, 0, torch.rand(ids.shape, generator=rng))
        at = [torch.where(ids < 0, 0, table.cpu()[ids]) for table in (self.up_table, self.down_table)]
        to = self.device
        here = ids.int().to(to)
        return Routing(Located(here, at[0].to(to), at[1].to(to), torch.full_like(here, -1)), weights.to(to))


def _packed_biases(gate: Tensor, up: Tensor, down: Tensor, shape: ExpertShape, device: torch.device) -> Biases:
    """Biases in panel order: 16 of gate, 16 of up, and so on; padding is NaN, since it must not be used."""
    count, panels = len(gate), shape.up.panels // 2
    both = poisoned(count, panels, 2, 16, dtype=torch.float32)
    for part, bias in enumerate((gate, up)):
        whole = poisoned(count, panels * 16, dtype=torch.float32)
        whole[:, : shape.width] = bias
        both[:, :, part] = whole.view(count, panels, 16)
    low = poisoned(count, shape.down.panels * 16, dtype=torch.float32)
    low[:, : shape.hidden] = down
    return Biases(both.flatten(1).to(device), low.to(device))


@dataclass
class Routing:
    """Location and weight of each pair's expert."""

    at: Located
    weights: Tensor


def choose(rng: torch.Generator, tokens: int, count: int, top_k: int) -> Tensor:
    return torch.rand(tokens, count, generator=rng).topk(top_k).indices
