"""Chooses the format of a model's answers: from its chat template, its vocabulary and its config, or by the options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from proa.errors import UsageError
from proa.parsers import harmony
from proa.parsers.calls import Tools
from proa.parsers.events import AnswerParser
from proa.parsers.formats import (
    CALL_ALIASES,
    CALLS,
    HARMONY,
    HARMONY_CALLS,
    HARMONY_REASONING,
    NONE,
    REASONING,
    REASONING_ALIASES,
    CallFormat,
    ReasoningFormat,
)
from proa.parsers.harmony import HarmonyAnswer
from proa.parsers.scan import Anchors, anchors
from proa.parsers.tagged import Context, TaggedAnswer
from proa.types import Decision

AUTO = "auto"
CALL_NAMES = (AUTO, NONE, *(f.name for f in CALLS), HARMONY)
REASONING_NAMES = (AUTO, NONE, *(f.name for f in REASONING), HARMONY)

# What a chat template writes -> the format; the first row of which all texts are found.
_CALLS_IN_TEMPLATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke")),
    ("glm45", ("<tool_call>", "\n<arg_key>")),
    ("glm47", ("<tool_call>", "<arg_key>")),
    ("step3p5", ("<function=", "<parameter=", "step3")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("nemotron", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("apriel", ("<tool_calls>", '"name"')),
    ("hermes", ("<tool_call>", '"name"')),
    ("llama3_json", ("<|start_header_id|>ipython<|end_header_id|>", '"parameters"')),
    ("llama3_json", ("<|python_tag|>", '"parameters"')),
)
# Formats of calls that a system message can describe.
_IN_SYSTEM_MESSAGE = (HARMONY, *(f.name for f in CALLS if f.json_written))
_REASONING_IN_TEMPLATES = ("<|channel>", "<mm:think>", "[THINK]", "<seed:think>", "<think>")
_BY_MODEL_TYPE = {"gpt_oss": HARMONY, "deepseek_v32": "deepseek_v32", "kimi_k2": "kimi_k2", "minimax_m2": "minimax_m2"}


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that its formats are chosen by. template: source of its chat templates, empty if it has
    none; renders_tools: True if it writes a request's tools. added: text of the vocabulary's added tokens, by id."""

    template: str
    renders_tools: bool
    added: Mapping[int, str]
    model_type: str = ""


# Where an answer begins: inside reasoning, after it or without it, or where it may still begin.
Place = Literal["inside", "after", "before"]


class AnswerFormat(Protocol):
    """How one model's answers are read."""

    @property
    def calls(self) -> CallFormat | None:
        """The format of calls, or as much of it as a grammar needs; None: calls stay text."""

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning; None: it stays text."""

    @property
    def text_opening(self) -> str:
        """What the model writes before visible text; empty in most formats."""

    def place(self, prompt: str, begun: str) -> Place:
        """Return where the answer to a prompt begins. prompt, begun: as for `parser`."""

    def parser(self, tools: Tools | None, prompt: str, begun: str, calls_before: int) -> AnswerParser:
        """Make the parser of one choice. tools: None if calls stay text; prompt: the rendered prompt; begun: the text
        of a final message that the answer continues."""


class TaggedFormat:
    """Delimiters of calls and of reasoning, each possibly none."""

    text_opening = ""

    def __init__(self, calls: CallFormat | None, reasoning: ReasoningFormat | None, added: Mapping[int, str]) -> None:
        self.calls: CallFormat | None = calls
        self.reasoning: ReasoningFormat | None = reasoning
        think = () if reasoning is None else (reasoning.open, reasoning.close)
        self._anchors = anchors((*think, *(() if calls is None else calls.markers)), added.values())
        self._kept = {
            True: _kept(added, self._anchors),
            False: _kept(added, think),
        }

    def parser(self, tools: Tools | None, prompt: str, begun: str, calls_before: int) -> AnswerParser:
        opened = self.place(prompt, begun) == "inside"
        context = Context(tools, opened, calls_before, self._kept[tools is not None])
        return TaggedAnswer(self.calls, self.reasoning, self._anchors, context)

    def place(self, prompt: str, begun: str) -> Place:
        if self.reasoning is None:
            return "after"
        if _is_open(self.reasoning, prompt, begun):
            return "inside"
        return "after" if begun.strip() or prompt.rstrip().endswith(self.reasoning.close) else "before"


class HarmonyFormat:
    """gpt-oss' channels."""

    calls: CallFormat | None = HARMONY_CALLS
    reasoning: ReasoningFormat | None = HARMONY_REASONING
    text_opening = "<|channel|>final<|message|>"

    def __init__(self, added: Mapping[int, str]) -> None:
        self._anchors: Anchors = anchors(harmony.MARKERS, added.values())
        self._kept = _kept(added, harmony.MARKERS)

    def parser(self, tools: Tools | None, prompt: str, begun: str, calls_before: int) -> AnswerParser:
        place = self.place(prompt, begun)
        context = Context(tools, place == "inside", calls_before, self._kept)
        return HarmonyAnswer(self._anchors, context, in_message=place != "before")

    def place(self, prompt: str, begun: str) -> Place:
        header, message, _ = prompt[prompt.rfind(harmony.START) :].rpartition(harmony.MESSAGE)
        in_message = bool(message) and not any(end in prompt[prompt.rfind(harmony.MESSAGE) :] for end in harmony.ENDS)
        if not in_message:
            return "before"
        return "inside" if "analysis" in header.rpartition(harmony.CHANNEL)[2] else "after"


def _kept(added: Mapping[int, str], markers: Collection[str]) -> dict[int, str]:
    used = {token for marker in markers for token in added.values() if len(token) > 2 and token in marker}
    return {number: token for number, token in added.items() if token in used and not token.isalnum()}


def _is_open(reasoning: ReasoningFormat, prompt: str, begun: str) -> bool:
    """Return True if the answer begins inside the reasoning."""
    in_begun = begun.rfind(reasoning.open.strip()) > begun.rfind(reasoning.close)
    return in_begun or prompt.rstrip().endswith(reasoning.open.strip())


@dataclass(frozen=True)
class Chosen:
    """The format of a model's answers, with rows for the start-up table. system_call: how a system message tells the
    model to write a call; empty if the chat template tells it."""

    format: AnswerFormat
    decisions: tuple[Decision, ...]
    system_call: str = ""


def choose(asked_calls: str, asked_reasoning: str, model: ModelFacts) -> Chosen:
    """Choose the parsers. asked: names of options or "auto". Raises UsageError for an unknown name, or if only
    one of the two is gpt-oss' format."""
    calls = _canonical(asked_calls, CALL_ALIASES, CALL_NAMES, "tool-call-parser")
    reasoning = _canonical(asked_reasoning, REASONING_ALIASES, REASONING_NAMES, "reasoning-parser")
    got_calls, why_calls = _calls(calls, model)
    got_reasoning, why_reasoning = _reasoning(reasoning, got_calls, model)
    if (got_calls == HARMONY) != (got_reasoning == HARMONY):
        raise UsageError(
            f"The parser of tool calls is {got_calls} and that of reasoning {got_reasoning}; gpt-oss writes both in "
            "one format.",
            f"Set --tool-call-parser and --reasoning-parser both to {HARMONY}, or both to other values.",
            param="reasoning_parser",
        )
    call_format = next((f for f in CALLS if f.name == got_calls), None)
    system_call = "" if model.renders_tools or call_format is None else call_format.json_written or CALLS[0].written
    if system_call:
        why_calls += "; the chat template ignores tools, so they are written into a system message"
    rows = (
        Decision("tool calls", asked_calls, got_calls, why_calls),
        Decision("reasoning", asked_reasoning, got_reasoning, why_reasoning),
    )
    if got_calls == HARMONY:
        return Chosen(HarmonyFormat(model.added), rows)
    reasoning_format = next((f for f in REASONING if f.name == got_reasoning), None)
    return Chosen(TaggedFormat(call_format, reasoning_format, model.added), rows, system_call)


def _canonical(asked: str, aliases: Mapping[str, str], names: Collection[str], option: str) -> str:
    name = asked.lower().replace("-", "_")
    name = aliases.get(name, name)
    if name not in names:
        raise UsageError(
            f"--{option} is {asked!r}, which is no known format.",
            f"Use one of {', '.join(names)}.",
            param=option.replace("-", "_"),
        )
    return name


def _calls(asked: str, model: ModelFacts) -> tuple[str, str]:
    if asked != AUTO:
        return asked, "as asked"
    for name, texts in _CALLS_IN_TEMPLATES:
        if all(text in model.template for text in texts) and (model.renders_tools or name in _IN_SYSTEM_MESSAGE):
            return name, f"the chat template has {texts[0].strip()}"
    if model.model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model.model_type], f"the model's type is {model.model_type}"
    if model.template and not model.renders_tools:
        return "hermes", "the form that most models know"
    return NONE, "the chat template has no known form of calls" if model.template else "there is no chat template"


def _reasoning(asked: str, calls: str, model: ModelFacts) -> tuple[str, str]:
    if asked != AUTO:
        return asked, "as asked"
    if calls == HARMONY:
        return HARMONY, "calls and reasoning are one format"
    for text in _REASONING_IN_TEMPLATES:
        if text in model.template:
            return _with_open(text, calls), f"the chat template has {text}"
    for text in _REASONING_IN_TEMPLATES:
        if text in model.added.values():
            return _with_open(text, calls), f"the vocabulary has the token {text}"
    return NONE, "neither the chat template nor the vocabulary has a known delimiter"


def _with_open(text: str, calls: str) -> str:
    """Return the name of the reasoning format that begins with `text`; of several the one of the family of `calls`."""
    names = [f.name for f in REASONING if f.open.startswith(text) and not f.in_answer]
    name = REASONING_ALIASES.get(calls, calls)
    return name if name in names else names[0]
