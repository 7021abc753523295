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
    """The events of one chunk, and `finish` if it is the choice's last. reasoning_tokens: how many of its tokens are
    reasoning, delimiters included."""

    events: list[Event] = []
    finish: AnswerFinish | None = None
    reasoning_tokens: int = 0


class ChoiceParser:
    """Feeds one choice's chunks to its parser, and derives the finish reason that clients see. one_call: the answer
    ends with its first call."""

    def __init__(self, parser: AnswerParser, *, one_call: bool = False) -> None:
        self._parser = parser
        self._one_call = one_call
        self._num_calls = 0

    def feed(self, text: str, markers: Sequence[int], finish: FinishReason | None, ends: Sequence[int] = ()) -> Parsed:
        """Add the text of a chunk. markers: see AnswerParser.feed; ends: of the chunk's tokens, as in Chunk."""
        if isinstance(self._parser, PlainText):
            return Parsed([Text(text)] if text else [], finish)
        events: list[Event] = []
        reasoning_tokens = begin = 0
        for end in ends[:-1]:
            within: Sequence[int] = [m - begin for m in markers if begin <= m < end] if markers else ()
            reasoning_tokens += self._feed(text[begin:end], within, events)
            begin = max(begin, end)
        # Text behind the last token's belongs to a token that is held back: it is fed with the last one.
        is_reasoning = self._feed(text[begin:], [m - begin for m in markers if m >= begin], events, finish)
        reasoning_tokens += is_reasoning and len(ends) > 0
        self._num_calls += sum(isinstance(event, ToolCall) for event in events)
        if self._one_call and self._num_calls:
            return Parsed(_until_second_call(events), "tool_calls", reasoning_tokens)
        return Parsed(events, "tool_calls" if finish == "stop" and self._num_calls else finish, reasoning_tokens)

    def _feed(self, text: str, markers: Sequence[int], events: list[Event], finish: FinishReason | None = None) -> bool:
        """Add the text of one token, and its events, joined with their neighbours. Return whether it is reasoning."""
        was_reasoning = self._parser.in_reasoning
        found = self._parser.feed(text, markers)
        if finish is not None:
            found += self._parser.finish(finish)
        for event in found:
            if events and (both := _join(events[-1], event)) is not None:
                events[-1] = both
            else:
                events.append(event)
        return was_reasoning or self._parser.in_reasoning


def _join(first: Event, second: Event) -> Event | None:
    """Join two neighbouring events into one; None if they differ in kind, or belong to different calls."""
    match first, second:
        case (Text(), Text()):
            return Text(first.text + second.text)
        case (Reasoning(), Reasoning()):
            return Reasoning(first.text + second.text)
        case (ToolArguments(), ToolArguments()) if first.index == second.index:
            return ToolArguments(first.index, first.json + second.json)
    return None


def _until_second_call(events: list[Event]) -> list[Event]:
    first = next(i for i, event in enumerate(events) if isinstance(event, ToolCall))
    arguments = [e for e in events[first:] if isinstance(e, ToolArguments) and e.index == 0]
    return [*events[: first + 1], *arguments]
