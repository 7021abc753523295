"""How prefill and decode divide time: tables, and what any durations lead to."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.machine.cost.turns import (
    LEAST_TOKENS,
    GapLimit,
    blocks_due,
    default_limit,
    fitting_tokens,
    left_s,
    over_tokens,
    overtaking_tokens,
    turn_tokens,
)


@pytest.mark.parametrize(
    ("limit", "step_s", "longest_s", "allowance_s"),
    [
        (GapLimit(factor=2.5), 0.04, 0.1, 0.06),
        (GapLimit(factor=1.01), 1.0, 1.01, 0.01),
        (GapLimit(seconds=0.08), 0.03, 0.08, 0.05),
        (GapLimit(seconds=0.08), 0.079, 0.08, 0.0079),  # at least a tenth of the step
        (GapLimit(seconds=0.08), 0.2, 0.08, 0.02),
    ],
)
def test_time_for_prompts(limit: GapLimit, step_s: float, longest_s: float, allowance_s: float) -> None:
    assert limit.longest_s(step_s) == pytest.approx(longest_s)
    assert limit.allowance_s(step_s) == pytest.approx(allowance_s)


@pytest.mark.parametrize(
    ("allowance_s", "block_s", "dues"),
    [
        (1.0, 1.0, [1, 1, 1, 1]),
        (1.0, 0.25, [4, 4, 4, 4]),
        (1.0, 0.6, [1, 1, 1, 1]),  # two would not fit
        (1.0, 2.0, [0, 1, 0, 1]),
        (0.25, 1.0, [0, 0, 0, 1]),
        (1.0, 0.0, [1, 1, 1, 1]),  # not measured yet
    ],
)
def test_how_many_blocks_are_due(allowance_s: float, block_s: float, dues: list[int]) -> None:
    owed, found = 0.0, []
    for _ in dues:
        blocks, owed = blocks_due(allowance_s, owed, block_s)
        found.append(blocks)
    assert found == dues


def test_a_block_that_was_not_measured_is_paid_for_later() -> None:
    """Its time was twice what is left: the next block comes after four steps, not two."""
    found, owed = [], 0.0
    for block_s in (0.0, *[2.0] * 6):
        blocks, owed = blocks_due(1.0, owed, block_s)
        found.append(blocks)
    assert found == [1, 0, 0, 0, 1, 0, 1]


SHORT_S = st.floats(1e-4, 1.0)


@given(SHORT_S, st.lists(SHORT_S, min_size=1, max_size=60))
def test_blocks_fit_or_keep_the_mean(allowance_s: float, blocks_s: list[float]) -> None:
    """Blocks that fit never take more than the allowance; those that do not are within the mean of it, and come."""
    owed = spent_s = 0.0
    for turn, block_s in enumerate(blocks_s, 1):
        fits = block_s <= allowance_s
        due, owed = blocks_due(allowance_s, owed, block_s)
        assert due >= 1 or not fits
        assert due * block_s <= allowance_s * (1 + 1e-9) or due == 1
        assert -1 <= owed < 1
        spent_s += due * block_s if not fits else 0.0
        assert spent_s <= turn * max(blocks_s) + 1e-9
    owed, steps = 0.0, 0
    longest_s = max(blocks_s)
    done = 0
    while done < 3:
        due, owed = blocks_due(allowance_s, owed, longest_s)
        done, steps = done + due, steps + 1
        assert done * longest_s <= steps * allowance_s * (1 + 1e-6)
        assert steps <= 4 * max(1.0, longest_s / allowance_s) + 4, "prompts advance"


@pytest.mark.parametrize(
    ("tokens", "block_s", "most_s", "fitting"),
    [(512, 0.010, 0.05, 2560), (2560, 0.015, 0.05, 8512), (512, 0.1, 0.05, 256), (256, 0.06, 0.01, 128),
     (800, 0.05, 0.05, 768), (512, 0.05, 0.05, 512)],
)  # fmt: skip
def test_how_many_tokens_keep_a_turn_short(tokens: int, block_s: float, most_s: float, fitting: int) -> None:
    assert fitting_tokens(tokens, block_s, most_s, LEAST_TOKENS) == fitting


@pytest.mark.parametrize(
    ("gpu_only", "deterministic", "factor"), [(False, False, 2.5), (True, False, None), (True, True, 2.5)]
)
def test_default_limit(gpu_only: bool, deterministic: bool, factor: float | None) -> None:
    limit = default_limit(gpu_only=gpu_only, deterministic=deterministic)
    assert limit == (None if factor is None else GapLimit(factor=factor))


@pytest.mark.parametrize(
    ("row_bytes", "free_bytes", "least", "lengths"),
    [
        (10, 10_000_000, 512, (8192, 4096, 2048, 1024)),
        (10, 1_500_000, 512, (2048, 1024)),
        (10, 500_000, 512, ()),
        (10, 10_000_000, 1024, (8192, 4096, 2048)),
        (10, 10_000_000, 8192, ()),
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
