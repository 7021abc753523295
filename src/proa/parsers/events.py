"""What a parser finds in an answer, and the interface of every parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec

from proa.types import FinishReason

# Why an answer ended, for clients. "tool_calls": the model stopped by itself after at least one complete call.
AnswerFinish = Literal["stop", "length", "tool_calls", "abort", "error"]


class Text(msgspec.Struct, frozen=True):
    """A piece of the visible answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the reasoning (chain of thought), without its delimiters."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """The beginning of call number `index` of this answer; its arguments follow as ToolArguments."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of call `index`. The pieces of one call, joined, are the JSON text of an object."""

    index: int
    json: str


Event = Text | Reasoning | ToolCall | ToolArguments


class AnswerParser(Protocol):
    """Splits the text of one choice into events; stateful, one instance per choice.

    The events do not depend on how the text was cut into pieces, except that neighbouring Text, Reasoning and
    ToolArguments pieces may be joined differently.
    """

    @property
    def kept(self) -> Mapping[int, str]:
        """Tokens whose text the parser needs even if special tokens are skipped, and whose places are `markers`."""

    @property
    def in_reasoning(self) -> bool:
        """True while the text is reasoning."""

    def feed(self, text: str, markers: Sequence[int] = ()) -> list[Event]:
        """Add text. markers: ascending offsets in `text` at which the text of a special token begins."""

    def finish(self, reason: FinishReason) -> list[Event]:
        """End the answer; return what was held back. An incomplete call is returned as Text."""


class PlainText:
    """Treats every answer as visible text: the parser of /v1/completions and of models without known markers."""

    kept: Mapping[int, str] = MappingProxyType({})
    in_reasoning = False

    def feed(self, text: str, markers: Sequence[int] = ()) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, reason: FinishReason) -> list[Event]:
        return []


class Parsed(msgspec.Struct, frozen=True):
    """The events of one chunk, and `finish` if it is the choice's last. is_reasoning: its tokens are reasoning."""

    events: list[Event] = []
    finish: AnswerFinish | None = None
    is_reasoning: bool = False


class ChoiceParser:
    """Feeds one choice's chunks to its parser, and derives the finish reason that clients see. one_call: the answer
    ends with its first call."""

    def __init__(self, parser: AnswerParser, *, one_call: bool = False) -> None:
        self._parser = parser
        self._one_call = one_call
        self._num_calls = 0

    def feed(self, text: str, markers: Sequence[int], finish: FinishReason | None) -> Parsed:
        was_reasoning = self._parser.in_reasoning
        events = self._parser.feed(text, markers)
        if finish is not None:
            events += self._parser.finish(finish)
        self._num_calls += sum(isinstance(event, ToolCall) for event in events)
        is_reasoning = was_reasoning or self._parser.in_reasoning
        if self._one_call and self._num_calls:
            return Parsed(_until_second_call(events), "tool_calls", is_reasoning)
        return Parsed(events, "tool_calls" if finish == "stop" and self._num_calls else finish, is_reasoning)


def _until_second_call(events: list[Event]) -> list[Event]:
    first = next(i for i, event in enumerate(events) if isinstance(event, ToolCall))
    arguments = [e for e in events[first:] if isinstance(e, ToolArguments) and e.index == 0]
    return [*events[: first + 1], *arguments]
