"""Where the experts of a layer are, said to whoever computes with them; and what one of them is. Never: deciding it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from proa.native.formats import Format, Layout, layout
from proa.native.weights import Activation

ROWS = 16  # of a panel
READ = (Format.BF16,)  # what GPU kernels decode
ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH)


@dataclass(frozen=True)
class ExpertShape:
    """One expert: gate and up [width, hidden], panel by panel, and down [hidden, width], packed in `format`.

    Raises ValueError for a format or an activation that the kernels do not have.
    """

    hidden: int
    width: int
    format: Format = Format.BF16
    group: int = 0
    activation: Activation = Activation.SILU

    def __post_init__(self) -> None:
        if self.format not in READ:
            raise ValueError(f"GPU kernels read experts of {[f.name for f in READ]}, not {self.format.name}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"GPU kernels have {[a.name for a in ACTIVATIONS]}, not {self.activation.name}")

    @cached_property
    def up(self) -> Layout:
        panels = 2 * -(-self.width // ROWS)
        return layout(self.format, panels * ROWS, self.hidden, self.group)

    @cached_property
    def down(self) -> Layout:
        return layout(self.format, self.hidden, self.width, self.group)


@dataclass(frozen=True)
class Residency:
    """Of a layer's experts, on the device: the only truth about where they are. It changes between steps alone."""

    up: Tensor  # int64 [E]: address of gate and up that the GPU computes with; 0: the CPU's
    down: Tensor  # int64 [E]
    cpu: Tensor  # int32 [E]: under which number the CPU has the expert; -1: the GPU's


@dataclass(frozen=True)
class Located:
    """Of each pair [T, k] of a token and an expert."""

    ids: Tensor  # int32, -1: nobody's
    up: Tensor  # int64, 0 where the GPU has nothing to do
    down: Tensor  # int64
    cpu: Tensor  # int32, -1 where the CPU has nothing to do
