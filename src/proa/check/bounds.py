"""The rule that tells rounding from an error. Never: computing what is compared.

A path rounds to its activations' type at some points of an op, and sums in float32. The same op in plain torch in that
type rounds at least as often (decision 052). Rounding errors are independent and have mean 0, so their variance adds:
the path's mean square error is at most that of plain torch. Both errors are measured against float32 with the same
inputs, and compared in units of plain torch's error in the same column, so that columns of large values do not hide
others, and in the same row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A row's errors may all follow from one rounding (of a routing weight, of a norm), so its root mean square is as
# uncertain as one normal variable: 6 standard deviations are passed once in 5e8 rows.
ROW_LIMIT = 6.0
# Over at least this many rows: the ratio of two variances of so many values each passes 9 once in 3e6 times.
WHOLE_LIMIT, WHOLE_ROWS = 3.0, 24
SUSPECT = 3.0  # of a phase that is wrong, rows from here on are named as wrong: rounding passes it once in 400 rows
# Root mean square of the relative error of rounding to `bits` significant bits, of values of any magnitude.
_ROUNDED = {torch.bfloat16: 0.42 * 2.0**-8, torch.float16: 0.42 * 2.0**-11, torch.float32: 0.42 * 2.0**-24}
FLOAT32 = 2.0**-20  # float32 sums in another order, and activations in fixed point of 23 bits (decision 028)
_TINY = 1e-30


def row_errors(got: Tensor, exact: Tensor, rough: Tensor) -> Tensor:
    """Each row's root mean square error in units of plain torch's, float32 [T]; infinite for rows that are not finite.

    got, exact, rough: [T, N], of the path, of float32, and of plain torch in the type of activations.
    """
    finite = (exact.isfinite() & rough.isfinite()).all(1)
    if not bool(finite.any()):
        return torch.full((len(exact),), torch.inf)
    columns = _column_errors(exact[finite], rough[finite])
    of_torch = ((rough.float() - exact).square() / columns).mean(1)  # rows with few keys average fewer roundings
    errors: Tensor = (((got.float() - exact).square() / columns).mean(1) / of_torch.clamp(min=1.0)).sqrt()
    return errors.masked_fill(~finite | ~errors.isfinite(), torch.inf)


def _column_errors(exact: Tensor, rough: Tensor) -> Tensor:
    """Mean square of plain torch's error in each column, at least that of rounding the result once."""
    of_torch = (rough.float() - exact).square().mean(0)
    size = exact.square().mean(0)
    once = size * _ROUNDED[rough.dtype] ** 2
    return torch.maximum(of_torch, once) + size.mean() * FLOAT32**2 + _TINY


def over_bound(errors: Tensor) -> Tensor:
    """row_errors of some rows -> difference / bound of each: above 1 is an error."""
    of_rows = errors / ROW_LIMIT
    if len(errors) < WHOLE_ROWS:
        return of_rows
    whole = errors.square().mean().sqrt() / WHOLE_LIMIT
    return torch.maximum(of_rows, whole.expand_as(of_rows))


def logit_bounds(x: Tensor, weight: Tensor) -> Tensor:
    """Bound of each router logit's error, [T, E]: float32 sums, and weights [E, H] rounded to bfloat16 if they are
    wider. x [T, H]."""
    exact_in_bf16 = torch.equal(weight.bfloat16().float(), weight)
    of_weight = 0.0 if exact_in_bf16 else 2.0**-8
    of_sum = weight.shape[1] * 2.0**-24 + FLOAT32
    return (of_weight + of_sum) * (x.float().abs() @ weight.abs().T)
