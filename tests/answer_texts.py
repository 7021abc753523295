"""Answers as the model families write them: for each format, a call's text, and the tokens that its vocabulary has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proa.parsers import harmony
from proa.parsers.choose import HARMONY, AnswerFormat, ModelFacts, choose
from proa.parsers.events import Event, Reasoning, Text, ToolArguments, ToolCall
from proa.parsers.formats import CALLS, REASONING

Write = Callable[[str, Mapping[str, Any]], str]  # (function, arguments) -> the call's text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'


def _functions(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _bare_function(name: str, arguments: Mapping[str, Any]) -> str:
    return _functions(name, arguments).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")


def _kimi(name: str, arguments: Mapping[str, Any]) -> str:
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def _glm(newline: str) -> Write:
    def write(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = [f"<arg_key>{k}</arg_key>{newline}<arg_value>{_plain(v)}</arg_value>" for k, v in arguments.items()]
        return f"<tool_call>{newline.join([name, *pairs])}{newline}</tool_call>"

    return write


def _minimax(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{values}</invoke>\n</minimax:tool_call>'


def _deepseek(call: str) -> Write:
    def write(name: str, arguments: Mapping[str, Any]) -> str:
        begin, _, end = call.partition("ARGUMENTS")
        text = begin.replace("NAME", name) + _json(arguments) + end
        return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    return write


def _dsml(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{k}" string="{_json(isinstance(v, str))}">{_plain(v)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v)}" for k, v in value.items()) + "}"
    return _json(value)


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"


# How each format's calls look; where a format has several, several.
WRITERS: dict[str, tuple[Write, ...]] = {
    "hermes": (_hermes,),
    "qwen3_coder": (_functions, _bare_function),
    "step3p5": (_functions,),
    "kimi_k2": (_kimi,),
    "glm45": (_glm("\n"),),
    "glm47": (_glm(""),),
    "minimax_m2": (_minimax,),
    "deepseek_v3": (_deepseek("function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"),),
    "deepseek_v31": (_deepseek("NAME<｜tool▁sep｜>ARGUMENTS"),),
    "deepseek_v32": (_dsml, lambda n, a: _dsml(n, a).replace("function_calls", "tool_calls")),
    "llama3_json": (lambda n, a: f'<|python_tag|>{{"name": "{n}", "parameters": {_json(a)}}}',),
    "mistral": (
        lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{_json(a)}",
        lambda n, a: f'[TOOL_CALLS] [{{"name": "{n}", "arguments": {_json(a)}}}]',
        lambda n, a: f"[TOOL_CALLS]{n}[CALL_ID]abc123XYZ[ARGS]{_json(a)}",
    ),
    "gemma4": (lambda n, a: f"<|tool_call>call:{n}{_gemma_value(dict(a))}<tool_call|>",),
    "nemotron": (lambda n, a: f'<TOOLCALL>[{{"name": "{n}", "arguments": {_json(a)}}}]</TOOLCALL>',),
    "apriel": (
        lambda n, a: f'<tool_calls>[{{"name": "{n}", "arguments": {_json(a)}}}]</tool_calls>',
        lambda n, a: f'<tool_calls>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_calls>',
    ),
    "pythonic": (lambda n, a: f"<|python_start|>{_python(n, a)}<|python_end|>",),
    "lfm2": (lambda n, a: f"<|tool_call_start|>{_python(n, a)}<|tool_call_end|>",),
    HARMONY: (_harmony,),
}
THINKS: dict[str, tuple[str, str]] = {f.name: (f.open, f.close) for f in REASONING if not f.in_answer}
NAMES = tuple(WRITERS)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of some added tokens; text of any other kind is ordinary."""

    tokens: tuple[str, ...]

    @property
    def added(self) -> dict[int, str]:
        return dict(enumerate(self.tokens))

    def marks(self, pieces: list[str]) -> tuple[str, list[int]]:
        """Return (the text, the offsets at which an added token begins) of pieces; a piece that is an added token's
        text is this token."""
        text, marks = "", []
        for piece in pieces:
            if piece in self.tokens:
                marks.append(len(text))
            text += piece
        return text, marks

    def split(self, text: str) -> list[str]:
        """Split a text as a tokenizer does: every added token's text is this token."""
        names = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        return [piece for piece in (re.split(f"({names})", text) if names else [text]) if piece]


def markers_of(name: str) -> tuple[str, ...]:
    """All delimiters of a format of calls."""
    return harmony.MARKERS if name == HARMONY else next(f for f in CALLS if f.name == name).markers


def vocabulary(name: str, thinks: str, *, as_tokens: bool) -> Vocabulary:
    """The tokens that a model with these formats has, or none."""
    if not as_tokens:
        return Vocabulary(())
    composite = ("<invoke", "</invoke>", "<function=", "</function>", "/>")
    whole = [m for m in (*markers_of(name), *THINKS.get(thinks, ())) if m not in composite and "DSML" not in m]
    tokens = [m.removesuffix("thought\n") for m in whole]
    return Vocabulary(tuple(dict.fromkeys([*tokens, *(["｜DSML｜"] if name == "deepseek_v32" else [])])))


def format_of(name: str, thinks: str, words: Vocabulary) -> AnswerFormat:
    return choose(name, thinks, ModelFacts("", True, words.added)).format


@dataclass(frozen=True)
class Read:
    """The events of an answer, joined."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON text)
    ids: tuple[str, ...]


def read(events: list[Event]) -> Read:
    text = "".join(e.text for e in events if isinstance(e, Text))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    begun = [e for e in events if isinstance(e, ToolCall)]
    assert [e.index for e in begun] == list(range(len(begun)))
    arguments = ["".join(e.json for e in events if isinstance(e, ToolArguments) and e.index == b.index) for b in begun]
    names = [e.name for e in begun]
    return Read(text, reasoning, tuple(zip(names, arguments, strict=True)), tuple(e.id for e in begun))
