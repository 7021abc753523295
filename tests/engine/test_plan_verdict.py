"""The verdict of a trial of plans, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.building.kept_trial import SHARE_MARGIN, Kept, keep, key_of, read_kept, share_in_vram
from proa.engine.building.plan_trial import (
    CHANCE,
    CLEAR,
    ROUNDS,
    TRIAL_S,
    Measured,
    best,
    may_win,
    verdict,
    wins_needed,
)
from proa.hybrid.choices import Choices
from proa.plan.plan import Plan
from unit.vram_cases import QWEN3_30B, gpu, machine, plan

BOTH, NO_FETCH, NO_READ = Choices(True, True), Choices(False, True), Choices(True, False)

times = st.floats(1e-4, 1.0)


def rounds_of(count: int) -> st.SearchStrategy[list[list[float]]]:
    return st.integers(1, 15).flatmap(
        lambda rounds: st.lists(st.lists(times, min_size=rounds, max_size=rounds), min_size=count, max_size=count)
    )


@pytest.mark.parametrize(("rounds", "needed"), [(1, 2), (6, 7), (7, 7), (8, 8), (10, 10), (11, 10), (15, 13)])
def test_wins_that_are_needed(rounds: int, needed: int) -> None:
    assert wins_needed(rounds) == needed


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_equal_plans_win_seldom(rounds: int, seed: int) -> None:
    wins = np.random.default_rng(seed).binomial(rounds, 0.5, 20_000)
    assert (wins >= wins_needed(rounds)).mean() <= CHANCE + 0.004  # 5 standard deviations


@given(rounds_of(2), st.floats(0.1, 10))
def test_laws_of_the_best(seconds: list[list[float]], factor: float) -> None:
    rule, other = seconds
    chosen, nearest, wins = best(seconds)
    assert nearest == 1
    assert wins == sum(b < a for a, b in zip(rule, other, strict=True))
    assert chosen in (0, 1)
    if chosen:
        assert wins >= wins_needed(len(rule))
    order = np.random.default_rng(0).permutation(len(rule))
    assert best([[of[i] for i in order] for of in seconds])[0] == chosen, "the order of rounds does not matter"
    assert best([rule, rule])[0] == 0, "equal plans: the rule"
    scaled = [[factor * s for s in of] for of in seconds]
    assert best(scaled)[2] == wins or factor != 1, "only ratios count, but for rounding"


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([0.9] * 11, 1),
        ([0.9] * 10 + [5.0], 1),  # one round that another program disturbed
        ([0.9] * 9 + [1.1] * 2, 0),  # wins too few rounds
        ([CLEAR + 0.001] * 11, 0),  # wins all, by too little
        ([0.5] * 6, 0),  # too few rounds to say
        ([1.1] * 11, 0),
    ],
)
def test_the_best(other: list[float], chosen: int) -> None:
    assert best([[1.0] * len(other), other])[0] == chosen


@given(st.lists(st.booleans(), min_size=ROUNDS, max_size=ROUNDS), st.integers(1, ROUNDS))
def test_a_plan_that_may_not_win_would_not_have_won(wins: list[bool], rounds: int) -> None:
    rule, other = [1.0] * ROUNDS, [0.9 if won else 1.0 for won in wins]
    if not may_win(rule[:rounds], other[:rounds]):
        assert best([rule, other])[0] == best([rule, other[:rounds]])[0] == 0
    elif all(wins[rounds:]):
        assert best([rule, other])[0] == 1


def test_the_fastest_of_several_that_win() -> None:
    assert best([[1.0] * 11, [0.9] * 11, [0.8] * 11, [0.7] * 9 + [1.1] * 2])[:2] == (2, 2)


@pytest.mark.parametrize(
    ("measured", "chosen", "words"),
    [
        (
            Measured((BOTH, NO_READ), (1, 4), ([0.0034] * 11, [0.0031] * 11), 2.5),
            1,
            "3.10 ms per token, mean of 1 and 4 requests, against 3.40 ms with co-fetch on, read ahead on; faster than "
            "the rule in 11 of 11 rounds, 2.5 s",
        ),
        (
            Measured((BOTH, NO_READ), (1,), ([0.0031] * 8, [0.003] * 8), 9.8, f"after {TRIAL_S:g} s"),
            1,
            "3.00 ms per token against 3.10 ms with co-fetch on, read ahead on; faster than the rule in 8 of 8 rounds, "
            "which ended after 10 s, 9.8 s",
        ),
        (
            Measured((BOTH, NO_READ), (1,), ([0.003] * 11, [0.0031] * 11), 0.5, same=True),
            0,
            "3.00 ms per token against 3.10 ms with co-fetch on, read ahead off; co-fetch on, read ahead off is not "
            "clearly faster: in 0 of 11 rounds, 10 of 11 are needed, 500 ms; co-fetch on and off are the same, as the "
            "CPU leaves no RAM bandwidth or has read too little",
        ),
        (Measured((BOTH, NO_FETCH), (1,), ((), ()), 10.1, "after 10 s"), 0, "nothing was compared in the trial, which"),
        (Measured((BOTH,), (1,), ((),), 0.1, same=True), 0, "nothing to compare: co-fetch on and off are the same"),
    ],
)
def test_what_the_row_says(measured: Measured, chosen: int, words: str) -> None:
    got, why = verdict(measured)
    assert got == chosen
    assert why.startswith(words)


# ---- the kept result

KEPT = Kept(co_fetch=False, read_ahead=True, why="3.1 ms against 3.4 ms", share=0.5, day="2026-11-26")


def test_a_result_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert read_kept(folder, "a", 0.5) is None
    assert keep(folder, "a", KEPT) == ""
    assert read_kept(folder, "a", 0.5) == KEPT
    assert read_kept(folder, "b", 0.5) is None
    assert [path.name for path in folder.iterdir()] == ["plan-a.json"], "no temporary file is left"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[:-9],
        lambda text: b"[1]",
        lambda text: text.replace(b"co_fetch", b"cofetch"),  # a field of another version
        lambda text: text.replace(b"false", b'"no"'),
    ],
)
def test_a_damaged_result_does_not_count(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, "a", KEPT)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert read_kept(tmp_path, "a", 0.5) is None
    assert caplog.text.count("cannot be read") == 1
    assert keep(tmp_path, "a", KEPT) == ""
    assert read_kept(tmp_path, "a", 0.5) == KEPT


def test_a_result_of_another_share_does_not_count(tmp_path: Path) -> None:
    keep(tmp_path, "a", KEPT)
    assert read_kept(tmp_path, "a", 0.5 + 0.9 * SHARE_MARGIN) == KEPT
    assert read_kept(tmp_path, "a", 0.5 - 1.1 * SHARE_MARGIN) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in keep(tmp_path / "file" / "folder", "a", KEPT)


def made(box_gib: float = 124, **asked: Any) -> Plan:
    return plan(QWEN3_30B, machine(box_gib, gpu(24)), context=4096, **asked)


def test_what_the_key_depends_on() -> None:
    def key(formats: tuple[str, ...] = ("int4",), **asked: Any) -> str:
        return key_of(made(**asked), QWEN3_30B, formats)

    same = {key(), key(box_gib=125), key(vram=20 << 30), key(plan_trial="again"), key(("int4",))}
    assert len(same) == 1, "the key is that of other free memory"
    others = [key(("bf16",)), key(max_running=3), key(co_fetch="off"), key(read_ahead="off"), key(threads=4)]
    assert len({*same, *others, key(deterministic=True), key(doorbell="memops")}) == 8


def test_the_share_in_vram() -> None:
    assert share_in_vram(made(gpu_experts="32")) == pytest.approx(32 / 128)
    assert share_in_vram(made(gpu_experts="none")) == 0
