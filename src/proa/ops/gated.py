"""MLPs packed for the native kernels: one stack with alternating panels of gate and up, or of up alone, and one of
down. Never: products."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.models.spec import SILU, Gating
from proa.native.formats import PANEL_ROWS
from proa.native.weights import Activation, Experts
from proa.ops.packed import Memory, RowSink, Stack
from proa.ops.table import Parameters

ACTIVATIONS = {
    "silu": Activation.SILU, "clamped_swiglu": Activation.CLAMPED_SWIGLU, "relu2": Activation.RELU2
}  # fmt: skip


class GatedBiases:
    """Biases of `count` MLPs of equal shape, zero until written, in the order of packed rows: up holds gate and up,
    float32 [count, panels, 2 (1 without a gate), 16]; down is float32 [count, padded hidden]."""

    def __init__(self, count: int, hidden: int, width: int, gating: Gating = SILU) -> None:
        self._hidden, self._width, self._inputs = hidden, width, gating.inputs
        self.up = torch.zeros(count, -(-width // PANEL_ROWS), len(gating.inputs), PANEL_ROWS)
        self.down = torch.zeros(count, -(-hidden // PANEL_ROWS) * PANEL_ROWS)

    def sinks(self, index: int) -> Parameters:
        """The sinks of one MLP's biases."""
        for part, name in enumerate(self._inputs):
            yield f"{name}.bias", BiasSink(self.up[index, :, part], self._width)
        yield "down.bias", BiasSink(self.down[index], self._hidden)


class GatedStacks:
    """The packed weights of `count` MLPs of equal shape, with `biases` or without."""

    def __init__(
        self, memory: Memory, count: int, hidden: int, width: int, biases: GatedBiases | None = None,
        gating: Gating = SILU, up_stored: set[str] | None = None, down_stored: set[str] | None = None,
    ) -> None:  # fmt: skip
        self.hidden, self.width, self.biases, self._gating = hidden, width, biases, gating
        self.up = Stack(memory, count, width, hidden, interleaved=gating.gated, stored=up_stored)
        self.down = Stack(memory, count, hidden, width, stored=down_stored)

    def experts(self) -> Experts:
        """A handle for the native kernels; the stacks and their biases must outlive it."""
        biases = {} if self.biases is None else {
            "gate_bias": self.biases.up.data_ptr(), "down_bias": self.biases.down.data_ptr()
        }  # fmt: skip
        activation = ACTIVATIONS[self._gating.kind]
        return Experts(self.up.matrix, self.down.matrix, activation, limit=self._gating.limit, **biases)

    def sinks(self, index: int) -> Parameters:
        """The sinks of one MLP: gate, if it has one, up, down (.weight, .bias)."""
        yield from self.weight_sinks(index)
        if self.biases is not None:
            yield from self.biases.sinks(index)

    def weight_sinks(self, index: int) -> Parameters:
        up, down = self.up, self.down
        for part, name in enumerate(self._gating.inputs):
            where = lambda: (up, 0)  # noqa: E731
            yield f"{name}.weight", RowSink(self.width, self.hidden, up.expect, where, index=index, part=part)
        yield "down.weight", RowSink(self.hidden, self.width, down.expect, lambda: (down, 0), index=index)


class BiasSink:
    """The sink of a bias in panel order: [panels, 16], possibly strided, or [panels * 16]; the first `width` elements
    are used."""

    row_unit = 1

    def __init__(self, panels: Tensor, width: int) -> None:
        self._panels = panels
        self.shape = (width,)

    def expect(self, stored: str) -> None:
        pass

    def fills(self, rows: object, first: int = 0, count: int | None = None) -> None:
        return None

    def write(self, first: int, rows: Tensor) -> None:
        spread = torch.zeros(self._panels.numel())
        spread[: self.shape[0]] = rows.flatten()
        self._panels.copy_(spread.view(self._panels.shape))
