"""Hidden states of a step in parts, which stay in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.executors import parts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sets(st.integers(0, 30)), st.integers(0, 40))
def test_non_finite_rows_of_pieces(sizes: list[int], bad: set[int], count: int) -> None:
    rows = torch.zeros(sum(sizes), 3)
    for row in bad:
        rows[row : row + 1, row % 3] = (torch.nan, torch.inf)[row % 2]
    want = [row for row in sorted(bad) if row < min(count, len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROWS_CHECKED", 4)
        assert parts.non_finite_rows(rows.split(sizes), count) == want
