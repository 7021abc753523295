"""What experts on the GPU should compute, in float64 from the bytes that the CPU's kernels read, with error bounds.
Never: tests.

The error of a sum of n products in float32 is n + c roundings; silu's slope is at most 1.1; gate_up's output is
rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.triton_bounds import EPS32, stored
from ops.triton_layers import Layer
from proa.native.formats import BF16_FORM
from proa.native.weights import Activation

BF16_ROUNDING = 2.0**-8 * 1.01  # half a unit in the last of 8 places


@dataclass
class Expected:
    """Each pair's output in float64, with the error bound of a kernel."""

    h: Tensor
    h_bound: Tensor
    y: Tensor
    y_bound: Tensor


def expected(layer: Layer, x: Tensor, ids: Tensor, matrix_unit: bool = False) -> Expected:
    """Expected outputs. matrix_unit: weights of formats other than bfloat16 may be rounded to it, once."""
    forms = layer.shape.up_form, layer.shape.down_form
    rounding = [BF16_ROUNDING if matrix_unit and form != BF16_FORM else 0.0 for form in forms]
    hidden, width = layer.shape.hidden, layer.shape.width
    pairs, top_k, to = ids.numel(), ids.shape[1], layer.device
    of = Expected(*(torch.zeros(pairs, n, dtype=torch.float64, device=to) for n in (width, width, hidden, hidden)))
    for e in set(ids.flatten().tolist()) - {-1}:
        mine = torch.where(ids.flatten() == e)[0].to(to)
        rows, weights = x[mine // top_k].double(), [w[e].to(to) for w in (layer.gate, layer.up, layer.down)]
        scaled = [of_part[e].to(to) for of_part in layer.scaled]
        biases = layer.gate_bias[e], layer.up_bias[e]
        gate, up = (rows @ w.T + bias for w, bias in zip(weights[:2], biases, strict=True))
        gate_error, up_error = (
            (rows.abs() @ size.T + bias.abs()) * (hidden + 8) * EPS32 + rows.abs() @ w.abs().T * rounding[0]
            for w, size, bias in zip(weights[:2], scaled[:2], biases, strict=True)
        )
        if layer.shape.activation is Activation.CLAMPED_SWIGLU:  # as silu of 1.702 times, with one more added to up
            gate, up = gate.clamp(max=layer.shape.limit), up.clamp(-layer.shape.limit, layer.shape.limit) + 1
            up_error = up_error + up.abs() * EPS32
        act = gate * (gate * (1.702 if layer.shape.activation is Activation.CLAMPED_SWIGLU else 1)).sigmoid() * up
        error = 1.15 * gate_error * (up.abs() + up_error) + gate.abs() * up_error
        error += (gate * up).abs() * (gate.abs() + gate.abs() ** 3 + 16) * EPS32  # exp errs by its argument's rounding
        h_bound = error + stored(act.abs() + error)
        sizes = scaled[2].T
        low = layer.down_bias[e]
        of.h[mine], of.h_bound[mine], of.y[mine] = act, h_bound, act @ weights[2].T + low
        of.y_bound[mine] = h_bound @ sizes + (act.abs() + h_bound) @ sizes * ((width + 8) * EPS32 + rounding[1])
        of.y_bound[mine] += low.abs() * (width + 8) * EPS32
    return of
