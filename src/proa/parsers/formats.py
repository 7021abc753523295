"""The formats in which model families write calls and reasoning, as data. A new one is a row, and a reader if its calls
have a form of their own.

Names are those of vLLM and SGLang; CALL_ALIASES and REASONING_ALIASES have their other names. Sources: the chat
templates and model cards of the published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from proa.parsers.calls import Call, MakeId, Tools, kimi_id, mistral_id, openai_id
from proa.parsers.json_calls import KIMI_ARGUMENTS, read_deepseek, read_json, read_kimi, read_mistral
from proa.parsers.literal_calls import GEMMA_QUOTE, read_gemma, read_pythonic
from proa.parsers.xml_calls import InvokeReader, read_arg_pairs, read_bare_function, read_functions

Read = Callable[[str, Tools], list[Call]]  # the text between delimiters -> calls; raises Malformed, Incomplete
_HEAD_CHARACTERS = 200


def _any(head: str) -> bool:
    return True


def _starting_with(*texts: str) -> Callable[[str], bool]:
    return lambda head: any(head.startswith(text) or text.startswith(head) for text in texts)


_PYTHON_HEAD = re.compile(r"\[([A-Za-z_][\w.]*(\(.*)?)?", re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """The delimiters of a call, or of several calls that are written as one.

    close: empty if the call lasts to the next `open`, or to the end of the answer. begins: True if text without
    whitespace may be the beginning of a call; once False, it stays False for longer text. opens_answer: `open` counts
    only at the beginning of the answer, and is part of the call's text. may_lack_close: `close` is not
    needed at the end of an answer that the model ended itself.
    """

    open: str
    close: tuple[str, ...]
    read: Read
    begins: Callable[[str], bool] = _any
    opens_answer: bool = False
    may_lack_close: bool = True

    def may_be(self, text: str) -> bool:
        return self.begins("".join(text[:_HEAD_CHARACTERS].split()))


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    sections: delimiters around one or more calls. only_in_sections: outside of them `pairs` are text. parts: tokens
    inside calls whose text is needed to read them. ends_answer: an answer ends with its first call.
    """

    name: str
    pairs: tuple[Pair, ...]
    sections: tuple[tuple[str, str], ...] = ()
    only_in_sections: bool = False
    parts: tuple[str, ...] = ()
    make_id: MakeId = openai_id
    written: str = ""  # a call of NAME with ARGUMENTS; empty if no grammar describes it
    parameter: str = ""  # one of ARGUMENTS: KEY with VALUE, STRING: whether it is a string; empty if they are JSON
    ends_answer: bool = False

    @property
    def json_written(self) -> str:
        """`written` if its arguments are JSON, else empty."""
        return "" if self.parameter else self.written

    @property
    def trigger(self) -> str:
        """The delimiter that begins `written`; empty if ordinary text can begin the same way."""
        return next((marker for marker in self.markers if self.written.startswith(marker)), "")

    @property
    def openings(self) -> tuple[str, ...]:
        """The delimiters that begin a call anywhere in an answer."""
        return (*(p.open for p in self.pairs if not p.opens_answer), *(begin for begin, _ in self.sections))

    @property
    def markers(self) -> tuple[str, ...]:
        """All delimiters and parts."""
        delimiters = [text for pair in self.pairs for text in (pair.open, *pair.close) if not pair.opens_answer]
        return (*delimiters, *(text for section in self.sections for text in section), *self.parts)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family delimits reasoning. in_answer: reasoning stays in the visible text, with its delimiters. last_words:
    what the model writes when its budget is spent, up to the end of the reasoning; empty: a newline and `close`."""

    name: str
    open: str = "<think>"
    close: str = "</think>"
    in_answer: bool = False
    last_words: str = ""

    @property
    def closing(self) -> str:
        """The text that ends reasoning whose budget is spent."""
        return self.last_words or f"\n{self.close}"


_WRITTEN = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
_WRITTEN_FUNCTION = "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>"
_WRITTEN_PARAMETER = "<parameter=KEY>\nVALUE\n</parameter>\n"
_OBJECT = _starting_with("{", "[")
_TAGGED_JSON = (Pair("<tool_call>", ("</tool_call>",), read_json, _OBJECT),)
_NAMED = _starting_with("name=")
_FUNCTIONS = (
    Pair("<tool_call>", ("</tool_call>",), read_functions, _starting_with("<function=")),
    Pair("<seed:tool_call>", ("</seed:tool_call>",), read_functions, _starting_with("<function=")),
    Pair("<function=", ("</function>",), read_bare_function, may_lack_close=False),
)
_ARG_PAIRS = (Pair("<tool_call>", ("</tool_call>",), read_arg_pairs, lambda head: not head.startswith(("{", "<"))),)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK = (Pair("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), read_deepseek),)
_DEEPSEEK_PARTS = ("<｜tool▁sep｜>",)
_CALL_WORDS = ('{"name"', '{"type"', '{"function"', '{"parameters"', '{"arguments"')

CALLS: tuple[CallFormat, ...] = (
    CallFormat("hermes", _TAGGED_JSON, written=_WRITTEN),
    CallFormat("qwen3_coder", _FUNCTIONS, written=_WRITTEN_FUNCTION, parameter=_WRITTEN_PARAMETER),
    CallFormat("step3p5", _FUNCTIONS, written=_WRITTEN_FUNCTION, parameter=_WRITTEN_PARAMETER),
    CallFormat(
        "kimi_k2",
        (Pair("<|tool_call_begin|>", ("<|tool_call_end|>",), read_kimi),),
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        parts=(KIMI_ARGUMENTS,),
        make_id=kimi_id,
        written="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    CallFormat(
        "glm45",
        _ARG_PAIRS,
        written="<tool_call>NAME\nARGUMENTS</tool_call>",
        parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    CallFormat(
        "glm47",
        _ARG_PAIRS,
        written="<tool_call>NAMEARGUMENTS</tool_call>",
        parameter="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    ),
    CallFormat(
        "minimax_m2",
        (Pair("<invoke", ("</invoke>",), InvokeReader(), _NAMED),),
        sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
        only_in_sections=True,
        written='<minimax:tool_call>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</minimax:tool_call>',
        parameter='<parameter name="KEY">VALUE</parameter>\n',
    ),
    CallFormat(
        "deepseek_v3",
        _DEEPSEEK,
        sections=(_DEEPSEEK_SECTION,),
        parts=_DEEPSEEK_PARTS,
        written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v31",
        _DEEPSEEK,
        sections=(_DEEPSEEK_SECTION,),
        parts=_DEEPSEEK_PARTS,
        written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v32",
        (Pair("<｜DSML｜invoke", ("</｜DSML｜invoke>", "/>"), InvokeReader("｜DSML｜"), _NAMED, may_lack_close=False),),
        sections=tuple((f"<｜DSML｜{name}>", f"</｜DSML｜{name}>") for name in ("function_calls", "tool_calls")),
        parts=("｜DSML｜",),
        written='<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="KEY" string="STRING">VALUE</｜DSML｜parameter>\n',
    ),
    CallFormat(
        "llama3_json",
        (
            Pair("<|python_tag|>", (), read_json, _OBJECT),
            Pair("{", (), read_json, _starting_with(*_CALL_WORDS), opens_answer=True),
        ),
        written='{"name": "NAME", "parameters": ARGUMENTS}',
    ),
    CallFormat(
        "mistral",
        (Pair("[TOOL_CALLS]", (), read_mistral),),
        parts=("[ARGS]", "[CALL_ID]"),
        make_id=mistral_id,
        written="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    ),
    CallFormat(
        "gemma4",
        (Pair("<|tool_call>", ("<tool_call|>",), read_gemma),),
        parts=(GEMMA_QUOTE,),
        written="<|tool_call>call:NAMEARGUMENTS<tool_call|>",  # read_gemma takes JSON too
    ),
    CallFormat(
        "nemotron",
        (Pair("<TOOLCALL>", ("</TOOLCALL>",), read_json, _OBJECT),),
        written='<TOOLCALL>[{"name": "NAME", "arguments": ARGUMENTS}]</TOOLCALL>',
    ),
    CallFormat(
        "apriel",  # MiniMax-M1 too; Apriel's template names both delimiters
        (Pair("<tool_calls>", ("</tool_calls>",), read_json, _OBJECT), *_TAGGED_JSON),
        written='<tool_calls>[{"name": "NAME", "arguments": ARGUMENTS}]</tool_calls>',
    ),
    CallFormat(
        "pythonic",
        (
            Pair("<|python_start|>", ("<|python_end|>",), read_pythonic),
            Pair("[", (), read_pythonic, lambda head: _PYTHON_HEAD.fullmatch(head) is not None, opens_answer=True),
        ),
        written="<|python_start|>[NAME(**ARGUMENTS)]<|python_end|>",
    ),
    CallFormat(
        "lfm2",
        (Pair("<|tool_call_start|>", ("<|tool_call_end|>",), read_pythonic),),
        written="<|tool_call_start|>[NAME(**ARGUMENTS)]<|tool_call_end|>",
    ),
)
HARMONY = "gpt_oss"  # channels, a format of calls and reasoning in one: harmony.py
# As much of gpt-oss' calls as a grammar needs; harmony.py reads them. The end token stands for <|call|>.
HARMONY_CALLS = CallFormat(
    HARMONY,
    (),
    written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    ends_answer=True,
)

# The text with which Qwen3's report ends reasoning at a budget (arXiv 2505.09388).
_QWEN3_LAST_WORDS = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)
REASONING: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("qwen3", last_words=_QWEN3_LAST_WORDS),
    *(ReasoningFormat(name) for name in ("deepseek_r1", "glm45", "kimi_k2", "minimax_m2", "step3p5")),
    ReasoningFormat("minimax_m2_append_think", in_answer=True),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningFormat("gemma4", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
)
HARMONY_REASONING = ReasoningFormat(HARMONY, "<|channel|>analysis<|message|>", "<|end|>", last_words="<|end|>")

NONE = "none"

CALL_ALIASES = {
    "qwen3": "hermes", "qwen25": "hermes", "qwen": "hermes", "longcat": "hermes",
    "qwen3_xml": "qwen3_coder", "nemotron_v3": "qwen3_coder", "nano_v3": "qwen3_coder", "seed_oss": "qwen3_coder",
    "nemotron_v2": "nemotron", "nano_v2": "nemotron",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v32", "deepseek_v4": "deepseek_v32",
    "llama3": "llama3_json", "llama4": "pythonic", "llama4_pythonic": "pythonic",
    "glm": "glm45", "kimi": "kimi_k2", "minimax": "minimax_m2", "minimax_m1": "apriel", "step3": "step3p5",
    "harmony": HARMONY, "openai": HARMONY,
}  # fmt: skip
REASONING_ALIASES = {
    "qwen3_thinking": "qwen3", "nano_v3": "qwen3", "nemotron_v3": "qwen3", "nemotron": "qwen3", "hermes": "qwen3",
    "deepseek": "deepseek_r1", "deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1",
    "deepseek_v32": "deepseek_r1", "deepseek_v4": "deepseek_r1",
    "glm": "glm45", "glm47": "glm45", "kimi": "kimi_k2", "step3": "step3p5", "magistral": "mistral",
    "minimax": "minimax_m2", "minimax_append_think": "minimax_m2_append_think",
    "harmony": HARMONY, "openai_gptoss": HARMONY, "openai": HARMONY,
}  # fmt: skip
