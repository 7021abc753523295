"""Steps in parts cut into chunks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.executors.batch import Span, StepLimits, chunks_of
from proa.plan.cells import Cells


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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=6), st.sampled_from([16, 64]))
def test_chunks_of_cells_are_those_of_each_prompt_by_itself(prompts: list[tuple[int, int]], size: int) -> None:
    """prompts: cells that are computed already, and tokens that are left."""
    cells = Cells(size, 1)
    spans = [Span(list(range(n)), size * done, [i], size * done + n, i) for i, (done, n) in enumerate(prompts)]
    chunks = chunks_of(spans, 1, cells)
    want = [
        (span.state, start, min(size, span.num_prompt - start))
        for span in spans
        for start in range(span.start, span.num_prompt, size)
    ]
    assert [(s.state, s.start, len(s.tokens)) for (s,) in chunks] == want
    assert [t for (s,) in chunks for t in s.tokens] == [t for s in spans for t in s.tokens]


@given(st.integers(0, 6), st.integers(1, 300), st.integers(0, 64), st.integers(1, 8), st.booleans())
def test_streamed_cells_go_on_until_one_is_not(first: int, left: int, least: int, most: int, whole: bool) -> None:
    cells, start = Cells(64, least), 64 * first
    tokens, count = cells.streamed_tokens(start, start + left, most, whole=whole)
    ends = [start + 64 * i for i in range(count)]
    assert count <= most
    assert all(cells.streams(end, start + left) for end in ends)
    assert tokens == sum(cells.size(end, start + left) for end in ends)
    after = start + tokens
    if count < most and after < start + left:  # the rest is short
        rest = cells.size(after, start + left)
        assert not cells.streams(after, start + left) or (whole and count > 0 and rest < 64)


@pytest.mark.parametrize(
    ("start", "decoding", "longest"),
    [(0, False, 8192), (0, True, 4096), (32768 - 10000, False, 8192), (32768 - 9999, False, 4096)],
)
def test_chunks_are_shorter_beside_decode_and_behind_many_tokens(start: int, decoding: bool, longest: int) -> None:
    """A request that comes or goes waits for a block of one chunk, of which attention takes most behind many tokens."""
    limits = StepLimits(8192, 8, 1 << 17, 16, 8, pass_rows=16384)
    spans = [Span(range(10000), start, [0], start + 10000)]
    chunks = limits.cut(spans, decoding=decoding)
    assert len(chunks) == -(-10000 // longest) <= limits.chunks
    assert [token for (span,) in chunks for token in span.tokens] == list(range(10000))


def test_a_step_that_fits_is_one_chunk_of_the_same_spans() -> None:
    spans = [Span([1, 2, 3], 0, [0], 3), Span([4], 5, [1], 6, 1)]
    assert chunks_of(spans, 16) == [spans]
