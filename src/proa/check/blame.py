"""Finds the experts that explain a wrong output of a mixture of experts. Never: computing experts."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

_EXPLAINED = 0.2  # of a row's error is left, if contributions that are missing or counted twice explain it
_GUILTY = 0.5  # a contribution's share of the error from which on it counts
# The error of a wrong expert, in proportion to its output, is at least this share of its error in any other row.
_ALIKE = 0.2
_MOSTLY = 0.9  # of rows, or of experts that no row clears: from here on all experts are named
_TINY = 1e-30
_NAMED = 8


def name_experts(
    error: Tensor, parts: Tensor, shared: Tensor | None, ids: Tensor, copies: Tensor, steps: Tensor, bad: Tensor
) -> str:  # fmt: skip
    """Name what explains the errors of the bad rows.

    error [T, H]: path - reference; parts [T, k, H]: the reference's weighted outputs of the chosen experts; shared
    [T, H]: that of the shared expert; ids [T, k]; copies int [T, k]: which of the expert's copies was read; steps int64
    [T]: the step that computed the row; bad [T].
    """
    if bool(error[bad].isfinite().all()) and (found := _by_contribution(error, parts, shared, ids, bad)):
        return found
    named = _by_choice(error, parts, ids, copies, bad, steps)
    return named or "all experts" + ("" if shared is None else ", or the shared one")


def _by_contribution(error: Tensor, parts: Tensor, shared: Tensor | None, ids: Tensor, bad: Tensor) -> str:
    """Experts whose contributions are missing, or counted more than once, if this explains all bad rows; else ""."""
    less: set[str] = set()
    more: set[str] = set()
    for row in bad.nonzero().flatten().tolist():
        columns = [*parts[row], *([] if shared is None else [shared[row]])]
        names = [f"expert {e}" for e in ids[row].tolist()] + ["the shared expert"]
        matrix = torch.stack(columns, 1).double()
        if matrix.shape[0] < 2 * matrix.shape[1]:
            return ""
        share = torch.linalg.lstsq(matrix, error[row, :, None].double()).solution
        left = (error[row].double() - (matrix @ share)[:, 0]).norm()
        if left > _EXPLAINED * error[row].double().norm():
            return ""
        for name, value in zip(names, share[:, 0].tolist(), strict=False):
            if abs(value) > _GUILTY:
                (less if value < 0 else more).add(name)
    if less and more:
        return f"{_listed(sorted(less, key=_number))}, computed as {_listed(sorted(more, key=_number))}"
    if less:
        return f"{_listed(sorted(less, key=_number))}, missing from the sum"
    return f"{_listed(sorted(more, key=_number))}, counted too often" if more else ""


def _number(name: str) -> int:
    return int(name.split()[-1]) if name[-1].isdigit() else 1 << 30


def _by_choice(error: Tensor, parts: Tensor, ids: Tensor, copies: Tensor, bad: Tensor, steps: Tensor) -> str:
    """The fewest experts that explain all bad rows, found greedily; "" if too many would be needed. A wrong expert is
    about equally wrong in all rows that read the same copy, in proportion to its output there, so a copy that is right
    in some row is right; if it moved meanwhile, in some row of the same step."""
    off = error.float().norm(dim=1, keepdim=True) / (parts.norm(dim=2) + _TINY)  # [T, k]
    off = off.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for times in (torch.zeros_like(steps), steps):
        left = _suspects(off, ids, copies, bad, times)
        explained = [row for row in left if row]
        if len(explained) < _MOSTLY * len(left):
            continue
        found, suspects = _fewest(explained), {expert for row in explained for expert in row}
        if len(found) == 1 or len(suspects) < _MOSTLY * len(set(ids.flatten().tolist())):
            return _listed([f"expert {expert}" for expert in sorted(found)])
    return ""


def _suspects(off: Tensor, ids: Tensor, copies: Tensor, bad: Tensor, times: Tensor) -> list[set[int]]:
    """For each bad row, its experts whose copies are nowhere clearly better. times: int64 [T]; rows are compared with
    those of the same time."""
    least: dict[tuple[int, int, int], float] = {}
    of_rows = zip(times.tolist(), ids.tolist(), copies.tolist(), off.tolist(), strict=True)
    every = [
        [((time, expert, copy), value) for expert, copy, value in zip(*row, strict=True)] for time, *row in of_rows
    ]
    for key, value in (read for row in every for read in row):
        least[key] = min(least.get(key, torch.inf), value)
    return [
        {key[1] for key, value in row if least[key] >= _ALIKE * value}
        for row, wrong in zip(every, bad.tolist(), strict=True)
        if wrong
    ]


def _fewest(rows: list[set[int]]) -> list[int]:
    """Experts of which each row has one."""
    found: list[int] = []
    while rows:
        counts = Counter(expert for row in rows for expert in row)
        found.append(min(counts, key=lambda expert: (-counts[expert], expert)))
        rows = [row for row in rows if found[-1] not in row]
    return found


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
