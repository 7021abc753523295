"""Hidden states of a step in parts, which stay in pieces."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.executors.parts import non_finite_rows


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sets(st.integers(0, 30)), st.integers(0, 40))
def test_non_finite_rows_of_pieces(sizes: list[int], bad: set[int], count: int) -> None:
    rows = torch.full((sum(sizes), 3), 3e38).bfloat16()
    for row in bad:
        rows[row : row + 1, row % 3] = (torch.nan, torch.inf, -torch.inf)[row // 3 % 3]
    want = [row for row in sorted(bad) if row < min(count, len(rows))]
    assert non_finite_rows(rows.split(sizes), count) == want


def test_non_finite_rows_of_a_device(device: torch.device) -> None:
    """Rows of a real model's width, with one value that is not finite, or several; bfloat16's largest is finite."""
    rows = torch.full((40, 2056), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16, device=device)
    values = (torch.nan, torch.inf, -torch.inf)
    for row in range(1, 40, 3):
        rows[row, 53 * row] = values[row // 3 % 3]
    rows[4, :40], rows[7, 2055], rows[10] = torch.inf, torch.nan, torch.nan
    assert non_finite_rows(rows.split(16), 38) == list(range(1, 38, 3))
