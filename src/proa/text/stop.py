"""Stop strings over token borders. Belongs here: matching and hold-back. Never: tokens, requests."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until one of the stop strings is complete.

    Whatever the pieces the text comes in, the first stop string to be *completed* wins; of several that end
    with the same character, the longest. Only text that may still become a stop string is held back. One
    Knuth-Morris-Pratt automaton per stop string: O(1) amortised per character.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        # Longest first, so that of two completed by the same character the longer is found first.
        self._automata = [_Automaton(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string if one was completed). After a match the rest of
        `text` is dropped, and the matcher must not be fed again."""
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
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How many characters at the end of the text so far are the beginning of `pattern`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _prefix_function(pattern)

    def advance(self, char: str) -> bool:
        """Take one more character; return whether the pattern is complete."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.pattern)


def _prefix_function(pattern: str) -> list[int]:
    """[i] = length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
