"""Times of decode steps and of prefill blocks between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proa.engine.executors.step_timer import WINDOW_BLOCKS, StepTimer


class Mark:
    def __init__(self, at_s: float) -> None:
        self.at_s, self.passed = at_s, True

    def seconds_since(self, earlier: Mark) -> float:
        return self.at_s - earlier.at_s


class Clock:
    """A queue of which only marks are used."""

    now_s = 0.0

    def mark(self, *, timed: bool = False) -> Mark:
        return Mark(self.now_s)


@pytest.fixture
def timed() -> tuple[StepTimer, Callable[[float, int], None]]:
    clock: Any = Clock()
    timer = StepTimer()

    def launch(seconds: float, blocks: int) -> None:
        timer.begin(clock)
        clock.now_s += seconds
        timer.end(blocks)

    return timer, launch


def test_a_block_takes_the_mean_of_the_last_ones(timed: tuple[StepTimer, Callable[[float, int], None]]) -> None:
    timer, launch = timed
    assert timer.pace() == (0.0, 0.0)
    launch(0.5, 0)
    launch(8.0, 2)
    assert timer.pace() == pytest.approx((0.5, 4.0))
    launch(1.0, 4)
    assert timer.pace() == pytest.approx((0.5, 9.0 / 6))
    for _ in range(WINDOW_BLOCKS):
        launch(3.0, 1)
    launch(0.25, 0)
    assert timer.pace() == pytest.approx((0.25, 3.0)), "older parts are forgotten"
    launch(100.0, 2 * WINDOW_BLOCKS)
    assert timer.pace() == pytest.approx((0.25, 100.0 / (2 * WINDOW_BLOCKS))), "one long part is enough"


def test_a_mark_that_was_not_passed_is_read_later(timed: tuple[StepTimer, Callable[[float, int], None]]) -> None:
    timer, launch = timed
    launch(1.0, 1)
    launch(2.0, 1)
    timer._pending[1][1].passed = False  # type: ignore[misc]
    assert timer.pace().block_s == pytest.approx(1.0)
    timer._pending[0][1].passed = True  # type: ignore[misc]
    assert timer.pace().block_s == pytest.approx(1.5)


def test_blocks_of_another_step_are_measured_anew(timed: tuple[StepTimer, Callable[[float, int], None]]) -> None:
    timer, launch = timed
    launch(0.5, 0)
    launch(8.0, 2)
    assert timer.pace() == pytest.approx((0.5, 4.0))
    launch(6.0, 1)  # of the old step, not read yet
    launch(0.25, 0)
    timer.forget_blocks()
    assert timer.pace() == pytest.approx((0.25, 0.0))
    launch(1.0, 1)
    assert timer.pace() == pytest.approx((0.25, 1.0))
