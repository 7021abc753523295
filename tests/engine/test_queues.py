"""The order of launches on two queues, and how much is launched ahead. Queues here only note what precedes what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from on_host import HostQueue
from proa.engine.executors.ahead import AHEAD_S, AT_ONCE, FIRST_UNITS, MOST_UNITS, PartsAhead
from proa.engine.executors.device_queue import Mark
from proa.engine.executors.queues import PROMPTS, STEPS, Queues


class Point:
    def __init__(self, before: frozenset[int], at_s: float = 0.0) -> None:
        self.before, self.at_s, self.passed = before, at_s, True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Point) -> float:
        return self.at_s - earlier.at_s


class Noting(HostQueue):
    """A queue of numbered launches: `before` are those that end before the next one starts."""

    def __init__(self) -> None:
        self.before: frozenset[int] = frozenset()

    def launch(self, number: int) -> frozenset[int]:
        before, self.before = self.before, self.before | {number}
        return before

    def mark(self, *, timed: bool = False) -> Point:
        return Point(self.before)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, Point)
        self.before |= mark.before


KINDS = st.tuples(st.sampled_from([STEPS, PROMPTS]), st.booleans(), st.booleans())


@given(st.lists(KINDS, max_size=30))
def test_launches_wait_for_the_other_queue_unless_both_may_run_beside_it(asked: list[tuple[int, bool, bool]]) -> None:
    """Two launches on different queues are unordered only if neither was to be ordered, when it was launched."""
    sides = Noting(), Noting()
    queues, launched = Queues(*sides), list[tuple[int, bool]]()
    for number, (side, apart, wide) in enumerate(asked):
        queues.apart = apart
        ordered = not apart or (side == STEPS and wide)
        with queues.on_steps(ordered=wide) if side == STEPS else queues.on_prompts():
            before = sides[side].launch(number)
        for earlier, (of, was_ordered) in enumerate(launched):
            if of == side or ordered or was_ordered:
                assert earlier in before, (number, earlier)
        if side == PROMPTS and apart and all(not was for _, was in launched):
            assert not any(of == STEPS and i in before for i, (of, _) in enumerate(launched)), "it waits in vain"
        launched.append((side, ordered))


def test_one_queue_needs_no_marks() -> None:
    queue = Noting()
    queues = Queues(queue)
    assert not queues.separate
    for number in range(4):
        with queues.on_steps() if number % 2 else queues.on_prompts():
            assert queue.launch(number) == frozenset(range(number))


@given(st.lists(st.floats(1e-5, 0.2), min_size=1, max_size=40))
def test_what_is_launched_ahead_takes_about_30_ms(seconds: list[float]) -> None:
    """At most AHEAD_S by the units' mean time, at least FIRST_UNITS, and never more than MOST_UNITS, AT_ONCE in one
    go."""
    ahead, now_s = PartsAhead(), 0.0
    assert ahead.room == FIRST_UNITS
    for took_s in seconds:
        ahead.launched(Point(frozenset(), now_s), Point(frozenset(), now_s + took_s))
        now_s += took_s
    assert ahead.pending == 0
    launched, mean_s = 0, sum(seconds[-16:]) / len(seconds[-16:])
    late = Point(frozenset())
    late.passed = False
    while room := ahead.room:
        assert room <= AT_ONCE
        ahead.launched(late, late)
        launched += 1
    assert FIRST_UNITS <= launched <= MOST_UNITS
    assert launched * mean_s <= AHEAD_S * (1 + 1e-9) or launched == FIRST_UNITS
    ahead.launched(late, late)
    assert ahead.room == 0
    ahead.forget()
    assert ahead.room == FIRST_UNITS
