"""The parser of gpt-oss' answers: messages in channels (OpenAI's harmony format).

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
<|start|>assistant to=functions.NAME<|channel|>commentary<|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from proa.parsers.calls import Call, Malformed, as_arguments, dump_json, load_json, openai_id
from proa.parsers.events import Event, Reasoning, Text, ToolArguments, ToolCall
from proa.parsers.scan import Anchors, Scanner
from proa.parsers.tagged import Context
from proa.types import FinishReason

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_AFTER_CALL = (*ENDS, START, CHANNEL)
_HEADER = re.compile(
    r"\s*(assistant)?(\s*to=\S+?)?\s*(<\|channel\|>\s*(?P<channel>analysis|commentary|final)(\s*to=[^\s<]+)?)?"
    r"\s*(<\|constrain\|>\s*(?P<type>[A-Za-z]+)|\bjson|\bcode)?\s*"
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TYPES = ("json", "code")  # that gpt-oss writes; other words behind <|constrain|> are text unless a message follows
_MAX_HEADER = 256  # characters without a delimiter; longer text is no header


class HarmonyAnswer:
    """An AnswerParser (events.py). The answer continues a prompt that ends with <|start|>assistant, so it begins with a
    header; or inside a message, in the analysis channel if context.opened, else in the final one."""

    def __init__(self, anchors: Anchors, context: Context, *, in_message: bool) -> None:
        self.kept = context.kept
        self._scanner = Scanner(anchors)
        self._has_tools = context.tools is not None
        self._num_calls = 0
        self._events: list[Event] = []
        self._header = ""  # of the message that begins, with its delimiters
        self._header_text = ""  # without them
        self._kind: Literal["header", "text", "reasoning", "call"] = "header"
        self._name = ""  # of the function, in "call"
        self._searched = 0  # characters of the call that have no delimiter
        if in_message:
            self._kind = "reasoning" if context.opened else "text"

    @property
    def in_reasoning(self) -> bool:
        """True while the text is reasoning."""
        return self._kind == "reasoning"

    def feed(self, text: str, markers: Sequence[int] = ()) -> list[Event]:
        self._scanner.feed(text, markers)
        self._run(final=False)
        return self._take_events()

    def finish(self, reason: FinishReason) -> list[Event]:
        self._run(final=True)
        if self._kind == "call":
            self._end_call(complete=reason == "stop")
        elif self._kind == "header":
            self._show_header()
        return self._take_events()

    def _take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _run(self, *, final: bool) -> None:
        marker: str | None = ""
        while marker is not None:
            if self._kind == "call":  # its text stays in the scanner until its end is there
                length, marker = self._scanner.find(_AFTER_CALL, self._searched, final=final)
                self._searched = length
                if marker is not None:
                    self._end_call(complete=True, length=length)
                    self._on_marker(self._scanner.cut(len(marker)))
                continue
            length, marker = self._scanner.find(MARKERS, final=final)
            if self._kind == "header":
                text = self._scanner.cut(length)
                self._header, self._header_text = self._header + text, self._header_text + text
                if len(self._header_text) > _MAX_HEADER:
                    self._show_header(always=True)
            else:
                self._emit(self._scanner.cut(length))
            if marker is not None:
                self._on_marker(self._scanner.cut(len(marker)))

    def _on_marker(self, marker: str) -> None:
        if self._kind == "header" and marker in (CHANNEL, CONSTRAIN):
            self._header += marker
        elif self._kind == "header" and marker == MESSAGE:
            self._begin_message()
        elif marker in (START, CHANNEL, *ENDS):
            if self._kind == "header":
                self._show_header()
            self._kind, self._header_text, self._header = "header", "", CHANNEL if marker == CHANNEL else ""

    def _begin_message(self) -> None:
        """Begin the message whose header is complete."""
        match, recipient = _HEADER.fullmatch(self._header), _RECIPIENT.search(self._header)
        if match is None:
            self._show_header()
            return
        if recipient is not None and self._has_tools:  # keeps the header, which becomes text if the call is malformed
            self._kind, self._name, self._searched = "call", recipient[1].removeprefix("functions."), 0
        else:
            self._header = ""
            self._kind = "reasoning" if match["channel"] == "analysis" else "text"

    def _show_header(self, *, always: bool = False) -> None:
        """Emit the header as text if it is malformed or that of a call without arguments; `always`: in any case."""
        header, self._header, self._kind = self._header, "", "text"
        match = _HEADER.fullmatch(header)
        plain = match is not None and match["type"] in (None, *_TYPES)
        if always or not plain or _RECIPIENT.search(header):
            self._emit(self._header_text)

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self._kind == "reasoning" else Text(text))

    def _end_call(self, *, complete: bool, length: int | None = None) -> None:
        text = self._scanner.cut(len(self._scanner.text) if length is None else length)
        header, self._header, self._kind = self._header, "", "text"
        if complete:
            try:
                arguments = dump_json(as_arguments(load_json(text) if text.strip() else {}))
            except Malformed:
                pass
            else:
                index = self._num_calls
                self._num_calls += 1
                self._events.append(ToolCall(index, openai_id(Call(self._name, {}), index), self._name))
                self._events.append(ToolArguments(index, arguments))
                return
        self._emit(header + MESSAGE + text)
