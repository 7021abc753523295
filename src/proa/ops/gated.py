"""Gated MLPs packed for the native kernels: a stack of gate and up, panel by panel, one of down. Never: products."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.native.formats import PANEL_ROWS
from proa.native.weights import Activation, Experts
from proa.ops.packed import Memory, RowSink, Stack
from proa.ops.table import Parameters


class GatedStacks:
    """`count` MLPs of one shape: down(silu(gate x) * up x)."""

    def __init__(
        self, memory: Memory, count: int, hidden: int, width: int, bias: bool,
        up_stored: set[str] | None = None, down_stored: set[str] | None = None,
    ) -> None:  # fmt: skip
        self.hidden, self.width = hidden, width
        self.up = Stack(memory, count, width, hidden, interleaved=True, stored=up_stored)
        self.down = Stack(memory, count, hidden, width, stored=down_stored)
        panels = -(-width // PANEL_ROWS)
        self.biases: tuple[Tensor, ...] = ()  # of gate and up [count, panels, 2, 16], of down; native kernels read them
        if bias:
            down = torch.zeros(count, -(-hidden // PANEL_ROWS) * PANEL_ROWS)
            self.biases = torch.zeros(count, panels, 2, PANEL_ROWS), down

    def experts(self) -> Experts:
        """For native kernels; the stacks, and their biases, must outlive it."""
        named = dict(zip(("gate_bias", "down_bias"), (bias.data_ptr() for bias in self.biases), strict=False))
        return Experts(self.up.matrix, self.down.matrix, Activation.SILU, **named)

    def sinks(self, index: int) -> Parameters:
        """Of one MLP: gate, up, down (.weight, .bias)."""
        up, down = self.up, self.down
        for part, name in enumerate(("gate", "up")):
            where = lambda: (up, 0)  # noqa: E731
            yield f"{name}.weight", RowSink(self.width, self.hidden, up.expect, where, index=index, part=part)
        yield "down.weight", RowSink(self.hidden, self.width, down.expect, lambda: (down, 0), index=index)
        if self.biases:
            gate_bias, down_bias = self.biases
            for part, name in enumerate(("gate", "up")):
                yield f"{name}.bias", BiasSink(gate_bias[index, :, part], self.width)
            yield "down.bias", down_bias[index, : self.hidden]


class BiasSink:
    """A bias whose numbers lie 16 here and 16 there: [panels, 16], of which `width` count."""

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
