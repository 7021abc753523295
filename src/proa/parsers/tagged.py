"""The parser of answers in which reasoning and calls stand between delimiters: all formats of formats.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proa.parsers.calls import Call, Incomplete, InString, Malformed, Tools, dump_json, openai_id
from proa.parsers.events import Event, Reasoning, Text, ToolArguments, ToolCall
from proa.parsers.formats import CallFormat, Pair, ReasoningFormat
from proa.parsers.scan import Anchors, Scanner
from proa.types import FinishReason

# "start": only whitespace since the beginning of the answer, or since a delimiter of a call or of reasoning.
_State = Literal["start", "text", "reasoning start", "reasoning", "call"]


@dataclass(frozen=True)
class Context:
    """The properties of a request that its parser needs.

    tools: None if calls stay text. opened: the prompt ends inside the reasoning. calls_before: calls in the
    conversation, for ids that count them. kept: as AnswerParser.kept.
    """

    tools: Tools | None = None
    opened: bool = False
    calls_before: int = 0
    kept: Mapping[int, str] = field(default_factory=dict)


@dataclass
class _Output:
    """Pieces of visible text or reasoning. Whitespace at a delimiter belongs to the delimiter."""

    kind: type[Text] | type[Reasoning]
    events: list[Event]
    trims: bool = False  # drop whitespace until the next other character
    _space: str = ""

    def add(self, text: str) -> None:
        if self.trims:
            text = text.lstrip()
        if not text:
            return
        self.trims = False
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            self.events.append(self.kind(solid))

    def drop_space(self) -> None:
        self._space, self.trims = "", True

    def flush(self) -> None:
        if self._space:
            self.events.append(self.kind(self._space))
        self._space = ""


class TaggedAnswer:
    """An AnswerParser (events.py) for a format of calls, a format of reasoning, or both.

    A call is an event when it is complete and was read; else its text is visible text. So its arguments are always
    valid JSON, and a call that max_tokens cuts off is never executed (decision 048). States depend only on the text
    that was removed from the scanner: hence the events do not depend on the pieces.
    """

    def __init__(
        self, calls: CallFormat | None, reasoning: ReasoningFormat | None, anchors: Anchors, context: Context
    ) -> None:
        self.kept = context.kept
        self._format = calls if context.tools is not None else None
        self._tools = context.tools or Tools()
        self._make_id = openai_id if calls is None else calls.make_id
        self._calls_before = context.calls_before
        self._num_calls = 0
        self._think = None if reasoning is None or reasoning.in_answer else reasoning
        self._anchors = anchors
        self._scanner = Scanner(anchors)
        self._events: list[Event] = []
        self._text = _Output(Text, self._events)
        self._reasoning = _Output(Reasoning, self._events)
        self._state: _State = "start"
        self._in_section = False
        self._wanted: dict[tuple[_State, bool], tuple[str, ...]] = {}  # what _inner_markers returned
        self._pair: Pair | None = None  # of the call in "call"
        self._opening = ""  # its delimiter
        self._searched = 0  # characters of it without a closing delimiter
        self._within: _State = "start"  # the state in which it began
        if reasoning is not None and context.opened:
            if reasoning.in_answer:
                self._text.add(reasoning.open)
            else:
                self._begin_reasoning()

    @property
    def in_reasoning(self) -> bool:
        """True while the text is reasoning."""
        state = self._within if self._state == "call" else self._state
        return state in ("reasoning", "reasoning start")

    def feed(self, text: str, markers: Sequence[int] = ()) -> list[Event]:
        self._scanner.feed(text, markers)
        self._run(final=False)
        return self._take_events()

    def finish(self, reason: FinishReason) -> list[Event]:
        self._run(final=True)
        while self._state == "call":
            self._end_open_call(reason)
            self._run(final=True)
        self._reasoning.flush()
        self._text.flush()
        return self._take_events()

    def _take_events(self) -> list[Event]:
        taken = list(self._events)
        self._events.clear()
        return taken

    def _run(self, *, final: bool) -> None:
        moves = True
        while moves:
            if self._state == "call":
                moves = self._step_call(final)
            elif self._state.endswith("start"):
                moves = self._step_start(final)
            else:
                moves = self._step_text(final)

    def _step_start(self, final: bool) -> bool:
        """Look for delimiters that count only here, then go on as in the middle. Return False to wait for text."""
        found = self._scanner.at_start(self._opening_markers(), final=final)
        if found is None:
            self._state = "text" if self._state == "start" else "reasoning"
            return True
        space, marker = found
        if marker is None:
            return False
        self._output().add(self._scanner.cut(space))
        pair = self._pair_of(marker)
        if pair is not None:  # one whose text begins with the delimiter
            self._begin_call(pair, "")
            return True
        self._scanner.cut(len(marker))
        self._on_marker(marker)
        return True

    def _step_text(self, final: bool) -> bool:
        key = (self._state, self._in_section)
        wanted = self._wanted.get(key)
        if wanted is None:
            wanted = self._wanted[key] = self._inner_markers()
        length, marker = self._scanner.find(wanted, final=final)
        self._output().add(self._scanner.cut(length))
        if marker is None:
            return False
        self._scanner.cut(len(marker))
        self._on_marker(marker)
        return True

    def _step_call(self, final: bool) -> bool:
        """Read the call if it is complete; emit its delimiter as text if it cannot be a call. Return False to wait."""
        assert self._pair is not None
        if not self._pair.may_be(self._scanner.text):
            return self._reject()
        closes = self._pair.close or ((self._pair.open,) if not self._pair.opens_answer else ())
        length, marker = self._scanner.find(closes, self._searched, final=final)
        if marker is None:
            self._searched = length
            return False
        try:
            calls = self._read(length)
        except Incomplete as error:
            if self._anchors.get(marker) is not None and not isinstance(error, InString):
                return self._reject()
            self._searched = length + len(marker)
            return True
        except Malformed:
            return self._reject()
        self._scanner.cut(length + len(marker) if self._pair.close else length)
        self._accept(calls)
        return True

    def _end_open_call(self, reason: FinishReason) -> None:
        """End a call without an end, at the end of the answer. It is complete if its format has no end, or if the
        model stopped by itself; a call that was cut off is text."""
        assert self._pair is not None
        text = self._scanner.text
        if not self._pair.close or (reason == "stop" and self._pair.may_lack_close):
            try:
                calls = self._read(len(text))
            except (Incomplete, Malformed):
                calls = []
            if calls:
                self._scanner.cut(len(text))
                self._accept(calls)
                return
        self._reasoning.flush()
        self._text.add(self._opening + self._scanner.cut(len(text)))
        self._state = "text"

    def _read(self, length: int) -> list[tuple[Call, str]]:
        """Return the calls in the first `length` characters, each with its arguments as JSON text."""
        assert self._pair is not None
        return [(c, dump_json(c.arguments)) for c in self._pair.read(self._scanner.text[:length], self._tools)]

    def _opening_markers(self) -> tuple[str, ...]:
        """Delimiters that count at the start of text, or of reasoning (where a second opening one is dropped)."""
        think = () if self._think is None else (self._think.open,)
        if self._state == "reasoning start":
            return think
        closing = () if self._think is None else (self._think.close,)
        pairs = () if self._format is None else self._format.pairs
        return (*think, *closing, *(pair.open for pair in pairs if pair.opens_answer))

    def _inner_markers(self) -> tuple[str, ...]:
        """Delimiters that count in the middle of text or reasoning: all that are tokens of the vocabulary; of the
        others, neither those that begin reasoning (an answer may mention them) nor those that close what is not
        open."""
        wanted = [self._think.close] if self._think is not None and self._state == "reasoning" else []
        candidates: tuple[str, ...] = () if self._think is None else (self._think.open, self._think.close)
        if self._format is not None:
            if self._in_section or not self._format.only_in_sections:
                wanted += [pair.open for pair in self._format.pairs if not pair.opens_answer]
            wanted += [begin for begin, _ in self._format.sections]
            wanted += [end for _, end in self._format.sections if self._in_section]
            candidates += self._format.markers
        return tuple(dict.fromkeys([*wanted, *(m for m in candidates if self._anchors.get(m) is not None)]))

    def _on_marker(self, marker: str) -> None:
        """Change the state after a delimiter, which was removed; a delimiter that closes nothing is dropped."""
        pair = self._pair_of(marker)
        sections = () if self._format is None else self._format.sections
        if pair is not None:
            self._begin_call(pair, marker)
        elif self._think is not None and marker == self._think.open:
            self._begin_reasoning()
        elif self._think is not None and marker == self._think.close:
            self._begin_text()
        elif any(marker in section for section in sections):
            self._in_section = any(marker == begin for begin, _ in sections)
            self._begin_text()

    def _pair_of(self, marker: str) -> Pair | None:
        pairs = () if self._format is None else self._format.pairs
        return next((pair for pair in pairs if pair.open == marker), None)

    def _output(self) -> _Output:
        return self._reasoning if self._state.startswith("reasoning") else self._text

    def _begin_reasoning(self) -> None:
        self._text.drop_space()
        self._reasoning.trims = True
        self._state = "reasoning start"

    def _begin_text(self) -> None:
        self._reasoning.drop_space()
        self._text.drop_space()
        self._state = "start"

    def _begin_call(self, pair: Pair, opening: str) -> None:
        self._pair, self._opening, self._searched = pair, opening, 0
        self._within, self._state = self._state, "call"

    def _reject(self) -> bool:
        """Emit the delimiter as text, and continue behind it."""
        self._state = "reasoning" if self._within.startswith("reasoning") else "text"
        self._output().add(self._opening)
        return True

    def _accept(self, calls: Sequence[tuple[Call, str]]) -> None:
        self._begin_text()
        for call, arguments in calls:
            index = self._num_calls
            self._num_calls += 1
            self._events.append(ToolCall(index, self._make_id(call, self._calls_before + index), call.name))
            self._events.append(ToolArguments(index, arguments))
