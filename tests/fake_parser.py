"""A parser of answers for tests of protocols: "[[think]]why[[text]]Hello[[call f]]{"a": 1}[[text]] bye"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from proa.parsers.events import Event, Reasoning, Text, ToolArguments, ToolCall
from proa.types import FinishReason

_MARKER = re.compile(r"\[\[(think|text|call (\w+))\]\]")


class FakeParser:
    """Splits at markers; call number i has the id "call_i". Pieces are passed on as they come."""

    kept: Mapping[int, str] = {}

    def __init__(self, *_: object) -> None:
        self._text, self._state, self._calls = "", "text", -1
        self.kept: dict[int, str] = {}

    @property
    def in_reasoning(self) -> bool:
        return self._state == "think"

    def feed(self, text: str, markers: Sequence[int] = ()) -> list[Event]:
        self._text += text
        return list(self._take(final=False))

    def finish(self, reason: FinishReason) -> list[Event]:
        return list(self._take(final=True))

    def _take(self, *, final: bool) -> Iterator[Event]:
        while marker := _MARKER.search(self._text):
            yield from self._events(self._text[: marker.start()])
            self._text = self._text[marker.end() :]
            self._state = marker[1].split()[0]
            if self._state == "call":
                self._calls += 1
                yield ToolCall(self._calls, f"call_{self._calls}", marker[2])
        held = len(self._text) if final or "[" not in self._text else self._text.index("[")
        yield from self._events(self._text[:held])
        self._text = self._text[held:]

    def _events(self, text: str) -> Iterator[Event]:
        if text and self._state == "call":
            yield ToolArguments(self._calls, text)
        elif text:
            yield Reasoning(text) if self._state == "think" else Text(text)
