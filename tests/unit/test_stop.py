"""StopMatcher against a naive search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proa.text.stop import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Find the first stop string to be completed; of several completed by the same character, the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops, include), ""
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.close(), None


few = st.text(alphabet="ab\n😀", max_size=5)
words = st.lists(few.filter(bool), min_size=1, max_size=4)


@given(pieces=st.lists(few, max_size=12), stops=words, include=st.booleans())
@example(pieces=["ab", "abab", "c"], stops=["abc", "bab"], include=False)
@example(pieces=["aaa", "ab"], stops=["aab"], include=True)
def test_any_split_matches_a_search_of_the_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == naive("".join(pieces), stops, include)


@given(pieces=st.lists(few, max_size=12), stops=words)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        text, matched = matcher.feed(piece)
        if matched is not None:
            return
        shown += text
        held = seen[len(shown) :]
        assert seen == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("cut", range(1, 8))
def test_every_split_of_one_stop_string(cut: int) -> None:
    text = "x<stop>y"
    assert run([text[:cut], text[cut:]], ["<stop>"], False) == ("x", "<stop>")


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopMatcher(()).feed("any text") == ("any text", None)


def test_a_huge_stop_string_costs_no_more_per_character() -> None:
    """100 000 equal characters against an equally long stop string: a quadratic algorithm would take minutes."""
    size = 100_000
    matcher = StopMatcher(["a" * size + "b"])
    assert matcher.feed("a" * (size + 5)) == ("a" * 5, None)
    assert matcher.feed("b") == ("", "a" * size + "b")
