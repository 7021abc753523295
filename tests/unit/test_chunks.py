"""Steps in parts cut into chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from proa.engine.executors.batch import Span, StepLimits, chunks_of


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 128), st.integers(0, 50))
def test_every_row_once_in_order(lengths: list[int], most: int, start: int) -> None:
    spans = [Span(list(range(1000 * i, 1000 * i + n)), start + i, [i], 999, i) for i, n in enumerate(lengths)]
    chunks = chunks_of(spans, most)
    rows = [(s.state, s.start + i, token) for s in itertools.chain(*chunks) for i, token in enumerate(s.tokens)]
    assert rows == [(s.state, s.start + i, token) for s in spans for i, token in enumerate(s.tokens)]
    sizes = [sum(len(s.tokens) for s in chunk) for chunk in chunks]
    assert all(0 < size <= most for size in sizes)
    assert len(sizes) <= StepLimits(most, 8, 1024, 4, 8, pass_rows=sum(lengths)).chunks
    assert len(set(sizes[:-1])) <= 1, "all but the last one are equally long"


def test_a_step_that_fits_is_one_chunk_of_the_same_spans() -> None:
    spans = [Span([1, 2, 3], 0, [0], 3), Span([4], 5, [1], 6, 1)]
    assert chunks_of(spans, 16) == [spans]
