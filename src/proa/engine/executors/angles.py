"""Rotary angles of a step's rows on a device. Never: how angles are computed (layers/rope.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from proa.engine.executors.batch import Span, StepLimits, positions_of
from proa.layers.rope import axes_of, cos_sin
from proa.models.spec import Rope
from proa.ops.host_block import Sender


class AngleTables:
    """cos and sin by position: a fixed table of all positions, or, for dynamic ropes, whose angles depend on the
    prompt's length, those of the step passed to `fill` last."""

    def __init__(self, ropes: Collection[Rope], limits: StepLimits, device: torch.device) -> None:
        every = torch.arange(limits.context_tokens)
        self._fixed = {
            rope: tuple(t.to(device) for t in cos_sin(rope, every, every + 1)) for rope in ropes if not rope.dynamic
        }
        self._axes = {rope: axes_of(rope).to(device) for rope in self._fixed if rope.axes}
        self._sender = Sender()
        self._changing = {
            rope: torch.zeros(2, limits.rows, rope.dim // 2, device=device) for rope in ropes if rope.dynamic
        }

    @property
    def changing(self) -> bool:
        """Whether there are dynamic ropes, so that `fill` must be called for each step."""
        return bool(self._changing)

    def fill(self, sequences: Sequence[Span]) -> None:
        """Compute the dynamic ropes' angles for the rows of a step."""
        for rope, places in self._changing.items():
            for angles, place in zip(cos_sin(rope, *positions_of(sequences)), places, strict=True):
                self._sender.send(angles.view(torch.int32), place[: len(angles)].view(torch.int32))

    def of(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """cos and sin float32 [T, dim / 2] of each rope; positions int64 [T], or [axes, T] (see Rope.axes)."""
        rows = positions.shape[-1]
        found = {rope: self._looked_up(rope, positions) for rope in self._fixed}
        return found | {rope: (t[0, :rows], t[1, :rows]) for rope, t in self._changing.items()}

    def _looked_up(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._fixed[rope]
        if positions.dim() == 2 and rope.axes:
            own = positions[self._axes[rope]].T  # [T, dim / 2]
            return cos.gather(0, own), sin.gather(0, own)
        one = positions if positions.dim() == 1 else positions[0]
        return cos.index_select(0, one), sin.index_select(0, one)
