"""Where the experts of a layer are, said to whoever computes with them; and what one of them is. Never: deciding it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, Layout, layout
from proa.native.weights import Activation
from proa.ops.bell_block import Bell

ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU)


@dataclass(frozen=True)
class ExpertShape:
    """One expert: gate and up [width, hidden], panel by panel, and down [hidden, width], each in its form.

    limit: of the clamped SwiGLU. Raises ValueError for an activation that the kernels do not have.
    """

    hidden: int
    width: int
    up_form: Form = BF16_FORM
    down_form: Form = BF16_FORM
    activation: Activation = Activation.SILU
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"GPU kernels have {[a.name for a in ACTIVATIONS]}, not {self.activation.name}")

    @cached_property
    def up(self) -> Layout:
        panels = 2 * -(-self.width // PANEL_ROWS)
        return layout(self.up_form.format, panels * PANEL_ROWS, self.hidden, self.up_form.group)

    @cached_property
    def down(self) -> Layout:
        return layout(self.down_form.format, self.hidden, self.width, self.down_form.group)


IN_PLACE_PAIRS = 64  # choices of a step of few tokens


@dataclass(frozen=True)
class Biases:
    """Of all experts of a layer, wherever those are, in the order of their packed rows, padded with zeros: float32."""

    up: Tensor  # [E, rows of gate and up]
    down: Tensor  # [E, rows of down]


@dataclass(frozen=True)
class PairBias:
    """Of pairs of a token and an expert, ids int32 [T, k]: one of the Biases of all experts."""

    ids: Tensor
    of: Tensor


@dataclass(frozen=True)
class InPlace:
    """Where the GPU can read experts of the CPU in RAM, over the bus, and how many of them it should.

    Of a step of up to IN_PLACE_PAIRS choices: where m experts are chosen that are the CPU's and have an address here,
    share[m] of them, the last ones that one token alone has chosen. Others stay with the CPU: an expert is somebody's
    for all its tokens, and the bus would be crossed by each choice.
    """

    up: Tensor  # int64 [E]: address of gate and up in RAM, or of where their pieces are (ops/pieces.py); 0: not there
    down: Tensor  # int64 [E]
    share: Tensor  # int32 [IN_PLACE_PAIRS + 1]
    in_pieces: bool = False  # whether there are addresses of the second kind


@dataclass(frozen=True)
class Residency:
    """Of a layer's experts, on the device: the only truth about where they are. It changes between steps alone."""

    up: Tensor  # int64 [E]: address of gate and up that the GPU computes with; 0: the CPU's
    down: Tensor  # int64 [E]
    cpu: Tensor  # int32 [E]: under which number the CPU has the expert; -1: the GPU's
    counts: Tensor | None = None  # int32 [E]: each choice of an expert is added here when it is located
    in_place: InPlace | None = None
    bell: Bell | None = None  # who chooses experts may hand the CPU's over at once


@dataclass(frozen=True)
class Located:
    """Of each pair [T, k] of a token and an expert."""

    ids: Tensor  # int32, -1: nobody's
    up: Tensor  # int64, as Residency or InPlace has it; 0 where the GPU has nothing to do
    down: Tensor  # int64
    cpu: Tensor  # int32, -1 where the CPU has nothing to do
    handed_over: bool = False  # the CPU's, to the CPU
