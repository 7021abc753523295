"""Finds markers in streamed text, and holds back text that may still become one.

A marker that is a token of the vocabulary, or contains one, is found only where that token was generated: the same
characters written with other tokens are text. A marker without such a token is found by its characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

# By marker: where in it the text of its token begins; None: no token of the vocabulary is part of it.
Anchors = Mapping[str, int | None]


def anchors(markers: Iterable[str], tokens: Iterable[str]) -> dict[str, int | None]:
    """Return the anchor of each marker; `tokens`: texts of the vocabulary's added tokens."""
    known = sorted((token for token in tokens if not token.isalnum()), key=len, reverse=True)
    return {m: next((m.index(t) for t in known if len(t) > 2 and t in m), None) for m in markers}


class Scanner:
    """The text of one choice that was received and not yet removed.

    What `find` returns in the end does not depend on how the text was cut into pieces: the leftmost marker, and of
    several that begin there the longest. While one further left or longer may still be completed, none is found.
    """

    def __init__(self, anchors: Anchors) -> None:
        self._anchors = anchors
        self._marks: set[int] = set()  # offsets in `text` at which the text of an added token begins
        self.text = ""

    def feed(self, text: str, markers: Collection[int]) -> None:
        """Add text. markers: offsets in `text` at which the text of an added token begins."""
        self._marks.update(len(self.text) + offset for offset in markers)
        self.text += text

    def find(self, wanted: Collection[str], start: int = 0, *, final: bool) -> tuple[int, str | None]:
        """Return (position, marker) of the first marker of `wanted` from `start` on. Without a complete one the marker
        is None, and the text before the position belongs to none; with `final` that is all text."""
        names = _by_length(tuple(wanted))
        at, name = self._complete(names, start)
        held = len(self.text) if final else self._incomplete(names, start)
        if held < len(self.text) and held <= at:
            return held, None
        return at, name

    def at_start(self, wanted: Collection[str], *, final: bool) -> tuple[int, str | None] | None:
        """Return (position, marker) if the text is whitespace and then one of `wanted`; marker None if more text must
        decide. Return None if the text begins otherwise."""
        start = len(self.text) - len(self.text.lstrip())
        names = _by_length(tuple(wanted))
        if not final and any(self._may_begin(name, start) for name in names):
            return start, None
        name = next((name for name in names if self._is_at(name, start)), None)
        return None if name is None else (start, name)

    def cut(self, length: int) -> str:
        """Remove and return the first `length` characters."""
        taken, self.text = self.text[:length], self.text[length:]
        self._marks = {mark - length for mark in self._marks if mark >= length}
        return taken

    def _complete(self, names: tuple[str, ...], start: int) -> tuple[int, str | None]:
        pattern = _pattern(names)
        while pattern is not None and (match := pattern.search(self.text, start)):
            start = match.start()
            name = next((name for name in names if self._is_at(name, start)), None)
            if name is not None:
                return start, name
            start += 1
        return len(self.text), None

    def _is_at(self, name: str, at: int) -> bool:
        anchor = self._anchors.get(name)
        return self.text.startswith(name, at) and (anchor is None or at + anchor in self._marks)

    def _incomplete(self, names: tuple[str, ...], start: int) -> int:
        """Return the first position from which the text may be the beginning of a marker; the length if none."""
        begin = max(start, len(self.text) - max(map(len, names), default=1) + 1)
        possible = (at for at in range(begin, len(self.text)) if any(self._may_begin(name, at) for name in names))
        return next(possible, len(self.text))

    def _may_begin(self, name: str, at: int) -> bool:
        """Return True if the text from `at` to its end is a proper prefix of the marker."""
        length, anchor = len(self.text) - at, self._anchors.get(name)
        is_prefix = length < len(name) and name.startswith(self.text[at:])
        return is_prefix and (anchor is None or length <= anchor or at + anchor in self._marks)


@cache
def _by_length(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names, key=len, reverse=True))


@cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, names))) if names else None
