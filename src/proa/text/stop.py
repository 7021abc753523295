"""Matches stop strings in streamed text, also across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete.

    The first stop string to be *completed* matches; of several completed by the same character, the longest. The result
    does not depend on how the text is split into pieces. Text is held back only while it may be the start of a stop
    string. One Knuth-Morris-Pratt automaton per stop string: O(1) amortised per character.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        # Longest first: of two stop strings completed by the same character, the longer one matches.
        self._automata = [_Automaton(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return (text that may be emitted, the stop string if one was completed). After a match the rest of
        `text` is dropped, and `feed` must not be called again."""
        if not self._automata:
            return text, None
        for i, char in enumerate(text):
            completed = None
            for automaton in self._automata:
                if automaton.advance(char) and completed is None:
                    completed = automaton.pattern
            if completed is not None:
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown if self._include_stop else shown[: -len(completed)], completed
        pending = self._held + text
        hold = max(automaton.matched for automaton in self._automata)
        self._held = pending[len(pending) - hold :]
        return pending[: len(pending) - hold], None

    def close(self) -> str:
        """Return the text held back and begin anew: at the end of the text, or where no stop string can continue."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held


class _Automaton:
    """Knuth-Morris-Pratt automaton; `matched` is the length of the longest suffix of the text that starts `pattern`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _prefix_function(pattern)

    def advance(self, char: str) -> bool:
        """Add one character; return True if the pattern is complete."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.pattern)


def _prefix_function(pattern: str) -> list[int]:
    """Compute the KMP table: [i] = length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
