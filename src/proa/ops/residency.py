"""Locations of a layer's experts, for the kernels that compute with them, and the shape of an expert. Never: deciding
where experts go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, Layout, layout
from proa.native.weights import Activation
from proa.ops.bell_block import Bell

ACTIVATIONS = (Activation.SILU, Activation.CLAMPED_SWIGLU)


@dataclass(frozen=True)
class ExpertShape:
    """The shape of one packed expert: gate and up [width, hidden] with alternating panels, and down [hidden, width].

    limit: of the clamped SwiGLU. Raises ValueError for an activation that the GPU kernels lack.
    """

    hidden: int
    width: int
    up_form: Form = BF16_FORM
    down_form: Form = BF16_FORM
    activation: Activation = Activation.SILU
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the GPU kernels implement {[a.name for a in ACTIVATIONS]}, not {self.activation.name}")

    @cached_property
    def up(self) -> Layout:
        panels = 2 * -(-self.width // PANEL_ROWS)
        return layout(self.up_form.format, panels * PANEL_ROWS, self.hidden, self.up_form.group)

    @cached_property
    def down(self) -> Layout:
        return layout(self.down_form.format, self.hidden, self.width, self.down_form.group)

    def matrix(self, up: bool) -> tuple[Layout, int]:
        """Layout and columns, without padding: of gate and up together if `up`, else of down."""
        return (self.up, self.hidden) if up else (self.down, self.width)


IN_PLACE_PAIRS = 64  # most (token, expert) pairs of a step for which experts are read in place


@dataclass(frozen=True)
class Biases:
    """Biases of all experts of a layer, on any device, float32, in the order of packed rows, padded with zeros."""

    up: Tensor  # [E, rows of gate and up]
    down: Tensor  # [E, rows of down]


@dataclass(frozen=True)
class PairBias:
    """Biases for (token, expert) pairs; ids: int32 [T, k]; of: Biases.up or Biases.down."""

    ids: Tensor
    of: Tensor


@dataclass(frozen=True)
class InPlace:
    """Addresses at which the GPU can read the CPU's experts in RAM, over PCIe, and how many it should read there.

    In a step of up to IN_PLACE_PAIRS pairs that chooses m of the CPU's experts with an address here, the GPU computes
    share[m] of them, the last ones that a single token has chosen; the CPU computes the others. Within a step an expert
    runs on one device for all its tokens; in-place reads are uncached, so each (token, expert) pair would cross PCIe.
    """

    up: Tensor  # int64 [E]: tagged address (ops/pieces.py) of gate and up in RAM; 0: none
    down: Tensor  # int64 [E]
    share: Tensor  # int32 [IN_PLACE_PAIRS + 1]
    in_pieces: bool = False  # some matrices are in pieces


@dataclass(frozen=True)
class Residency:
    """The residency table of a layer's experts, on the device; the only source of truth. Changes only between steps."""

    up: Tensor  # int64 [E]: address of gate and up in GPU memory; 0: the CPU computes the expert
    down: Tensor  # int64 [E]
    cpu: Tensor  # int32 [E]: the expert's number on the CPU; -1: the GPU computes it
    counts: Tensor | None = None  # int32 [E]: incremented for each (token, expert) pair that is located
    in_place: InPlace | None = None
    bell: Bell | None = None  # the kernel that chooses experts may ring it to hand the CPU's pairs over


@dataclass(frozen=True)
class Located:
    """Location of each (token, expert) pair, [T, k]."""

    ids: Tensor  # int32; -1: no expert
    up: Tensor  # int64: address from Residency or InPlace; 0: not computed by the GPU
    down: Tensor  # int64
    cpu: Tensor  # int32: the expert's number on the CPU; -1: not computed by the CPU
    handed_over: bool = False  # the CPU's pairs were already handed over to it
