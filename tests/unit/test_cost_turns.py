"""How prefill and decode divide time: tables, and the share of the time that any durations lead to."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.machine.cost.turns import (
    blocks_due,
    fitting_tokens,
    left_s,
    over_tokens,
    overtaking_tokens,
    prefill_share,
    turn_tokens,
)


@pytest.mark.parametrize(
    ("share", "step_s", "block_s", "dues"),
    [
        (0.5, 1.0, 1.0, [1, 1, 1, 1]),
        (0.5, 1.0, 2.0, [0, 1, 0, 1]),
        (0.5, 1.0, 0.25, [4, 4, 4, 4]),
        (0.75, 1.0, 2.0, [1, 2, 1, 2]),
        (0.2, 1.0, 0.5, [0, 1, 0, 1]),
        (0.5, 0.0, 1.0, [1, 1, 1, 1]),  # durations are unknown
        (0.5, 1.0, 0.0, [1, 1, 1, 1]),
    ],
)
def test_how_many_blocks_are_due(share: float, step_s: float, block_s: float, dues: list[int]) -> None:
    owed, found = 0.0, []
    for _ in dues:
        blocks, owed = blocks_due(share, owed, step_s, block_s)
        found.append(blocks)
    assert found == dues


@given(st.floats(0.05, 0.95), st.lists(st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)), min_size=1, max_size=50))
def test_blocks_take_their_share_of_the_time(share: float, durations: list[tuple[float, float]]) -> None:
    """Summed over steps, the blocks that ran and the blocks still owed are those that the share asks for."""
    owed, ran, asked = 0.0, 0, 0.0
    for step_s, block_s in durations:
        blocks, owed = blocks_due(share, owed, step_s, block_s)
        ran, asked = ran + blocks, asked + share / (1 - share) * step_s / block_s
        assert 0 <= owed < 1
    assert ran + owed == pytest.approx(asked)


@pytest.mark.parametrize(
    ("tokens", "block_s", "fitting"),
    [(512, 0.010, 2560), (2560, 0.015, 8448), (512, 0.1, 512), (256, 0.06, 512), (800, 0.05, 768), (512, 0.05, 512)],
)
def test_how_many_tokens_keep_a_turn_short(tokens: int, block_s: float, fitting: int) -> None:
    assert fitting_tokens(tokens, block_s) == fitting


@pytest.mark.parametrize(
    ("gpu_only", "deterministic", "share"), [(False, False, 0.5), (True, False, 0.0), (True, True, 0.5)]
)
def test_default_share_of_prefill(gpu_only: bool, deterministic: bool, share: float) -> None:
    assert prefill_share(gpu_only=gpu_only, deterministic=deterministic) == share


@pytest.mark.parametrize(
    ("row_bytes", "free_bytes", "least", "lengths"),
    [
        (10, 10_000_000, 512, (4096, 2048, 1024)),
        (10, 1_500_000, 512, (2048, 1024)),
        (10, 500_000, 512, ()),
        (10, 10_000_000, 1024, (4096, 2048)),
        (10, 10_000_000, 4096, ()),
    ],
)
def test_lengths_of_prefill_steps(row_bytes: int, free_bytes: int, least: int, lengths: tuple[int, ...]) -> None:
    """Rows take at most 2 % of the free VRAM."""
    assert turn_tokens(lambda tokens: tokens * row_bytes, free_bytes, least) == lengths


@pytest.mark.parametrize(
    ("age_s", "done", "tokens", "left"),
    [(2.0, 0.5, 4096, 2.0), (1.0, 0.1, 4096, 9.0), (5.0, 1.0, 4096, 0.0), (1.0, 0.0, 4096, 0.0), (0.0, 0.0, 8192, inf)],
)
def test_time_left_of_a_step(age_s: float, done: float, tokens: int, left: float) -> None:
    assert left_s(age_s, done, tokens) == pytest.approx(left)


@pytest.mark.parametrize(
    ("left", "token_s", "tokens"),
    [(0.29, 0.0, 0), (0.31, 0.0, 1024), (inf, 0.0, 1024), (1.0, 0.002, 500), (10.0, 0.002, 1024), (inf, 0.002, 1024)],
)
def test_tokens_that_may_overtake(left: float, token_s: float, tokens: int) -> None:
    """Only prompts that are done before the step that they overtake would be."""
    assert overtaking_tokens(1024, left, token_s) == tokens


def test_a_step_that_overtakes_is_computed_at_once() -> None:
    assert [over_tokens(of) for of in (16, 512, 4096)] == [16, 512, 1024]
