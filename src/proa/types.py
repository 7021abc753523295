"""Immutable structs that are passed between packages and between the API and engine processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import msgspec

from proa.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

# Progress of a download or of loading: (phase, done, total), in bytes or items; total 0: unknown.
ProgressCallback = Callable[[str, int, int], None]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an answer's text must have, from its first to its last character.

    text: a JSON Schema; a regular expression; a JSON list of strings; a grammar in Lark or GBNF syntax; Tags as JSON.
    whitespace: regular expression of the text between two JSON tokens, `None`: a space, or a line break and up to 20
    spaces or tabs. param: request field that it came from, for error messages. Use the class methods to make one.
    """

    kind: Literal["json", "regex", "choice", "grammar", "tags"]
    text: str
    whitespace: str | None = None
    param: str = "constraint"

    @classmethod
    def json(cls, schema: object, *, whitespace: str | None = None, param: str = "constraint") -> Constraint:
        """Demand JSON that a schema accepts: a dict, its text, or a pydantic model class. Raises RequestError."""
        described = getattr(schema, "model_json_schema", None)
        value = schema if described is None else described()
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param}: the JSON Schema cannot be written as JSON: {error}.", param=param) from error
        return cls(kind="json", text=text, whitespace=whitespace, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "constraint") -> Constraint:
        """Demand a full match of a regular expression (Rust's syntax, without look-around and back-references)."""
        return cls(kind="regex", text=pattern, param=param)

    @classmethod
    def choice(cls, options: Sequence[str], *, param: str = "constraint") -> Constraint:
        """Demand one of these texts."""
        return cls(kind="choice", text=json.dumps(list(options), ensure_ascii=False), param=param)

    @classmethod
    def grammar(cls, text: str, *, param: str = "constraint") -> Constraint:
        """Demand a text of a grammar: Lark with a rule `start`, or GBNF with a rule `root`."""
        return cls(kind="grammar", text=text, param=param)

    @classmethod
    def tags(cls, tags: Tags, *, param: str = "constraint") -> Constraint:
        """Demand text with tags; see Tags."""
        return cls(kind="tags", text=msgspec.json.encode(tags).decode(), param=param)


class Tag(msgspec.Struct, frozen=True):
    """The text `begin`, then text that `content` (of any kind but tags) accepts, then the text `end`."""

    begin: str
    content: Constraint
    end: str = ""


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tags, with `separator` between two.

    triggers: texts that begins of tags start with. With triggers the tags stand in free text, where a trigger always
    starts a tag; without triggers there is no other text. at_least, at_most: number of tags; with at_most the answer
    ends after the last tag.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...] = ()
    separator: str = ""
    at_least: int = 1
    at_most: int | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning with which an answer begins, for a budget and for a constraint, which applies after it.

    is_open: the prompt ends inside it; else the answer may begin with `opening`, a constrained one only if that is a
    token. opening, end: its delimiters. calls: texts that begin a tool call, from where no budget counts. budget: most
    tokens between the delimiters. closing: token ids that follow when the budget is spent; their text contains `end`.
    AsyncLLM.thinking makes one.
    """

    is_open: bool
    opening: str
    end: str
    calls: tuple[str, ...] = ()
    budget: int | None = None
    closing: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of a request. `None`: use the checkpoint's generation_config.json, else a neutral value.

    temperature 0: greedy. top_k 0: no top-k. `logprobs=k`: return the logprob of the sampled token and of the k most
    likely tokens. max_tokens `None`: up to the context length. `stop` may be a plain string. return_progress: chunks
    with Progress while the prompt is computed.

    use_beam_search: return the n best of `best_of` beams (default n), by the sum of their logprobs divided by
    length ** length_penalty; early_stopping: end when best_of beams are finished, not when no better one can follow.
    Logprobs are the model's own, so parameters that change them, and `stop`, are refused.

    Raises RequestError on construction for a value of the wrong type or range, and for parameters that exclude each
    other.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_progress: bool = False
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        self._check_types()
        values = msgspec.structs.asdict(self)
        for name, low, high in SAMPLING_RANGES:
            value: float | None = values[name]
            if value is not None and not low <= value <= high:  # NaN fails here too
                raise RequestError(f"{name} is {value}.", f"Use {low} to {high}.", param=name)
        if self.top_p == 0.0:
            raise RequestError(
                "top_p is 0.", "Use a value above 0; for greedy decoding set temperature to 0.", param="top_p"
            )
        if any(not s for s in self.stop):
            raise RequestError("A stop string is empty.", "Remove it.", param="stop")
        if self.constraint is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos is set beside a constraint, whose answer ends where the constraint is fulfilled.",
                "Leave one of them out.",
                param="ignore_eos",
            )
        if any(not -100.0 <= b <= 100.0 for b in self.logit_bias.values()):
            raise RequestError("A logit_bias value is out of range.", "Use -100 to 100.", param="logit_bias")
        if self.use_beam_search:
            self._check_beam_search()
        else:
            self._check_no_beam_search()

    @property
    def sequences(self) -> int:
        """Number of sequences that run at once: the beams, or the n answers."""
        return self.best_of if self.use_beam_search and self.best_of is not None else self.n

    def _check_beam_search(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of}, but n is {self.n}: there are fewer beams than answers.",
                f"Set best_of to {self.n} or more.",
                param="best_of",
            )
        for name, neutral in _NEUTRAL_IN_BEAM_SEARCH:
            value = getattr(self, name)
            if value is not None and value != neutral:
                field = name if self.constraint is None or name != "constraint" else self.constraint.param
                raise RequestError(
                    f"{field} is given beside use_beam_search, which ranks beams by the model's own logprobs and reads "
                    "no text.",
                    f"Leave {field} out, or set use_beam_search to false.",
                    param=field,
                )

    def _check_no_beam_search(self) -> None:
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of is {self.best_of}, but n is {self.n}. Without beam search every sampled answer is returned.",
                "Leave best_of out, set it to n, or set use_beam_search to true.",
                param="best_of",
            )
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != neutral:
                raise RequestError(
                    f"{name} is {getattr(self, name)}, but it has an effect only in beam search.",
                    f"Leave {name} out, or set use_beam_search to true.",
                    param=name,
                )

    def _check_types(self) -> None:
        """Convert each field to its declared type or raise RequestError: a wrong type would fail only in the engine."""
        values = msgspec.structs.asdict(self)
        for field in _sampling_fields():
            if values[field.name] is field.default:
                continue
            try:
                checked = msgspec.convert(values[field.name], field.type)
            except msgspec.ValidationError as error:
                raise RequestError(f"{field.name} is {values[field.name]!r}.", f"{error}.", param=field.name) from error
            msgspec.structs.force_setattr(self, field.name, checked)


@cache
def _sampling_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of SamplingParams; msgspec takes 0.6 ms to evaluate their annotations, for each request."""
    return msgspec.structs.fields(SamplingParams)


MOST_TOKENS = 2**31  # a limit for a request's numbers of tokens
MOST_LOGPROBS = 100  # alternatives per token; buffers of a GPU have this many

# Parameters that beam search refuses unless None or neutral.
_NEUTRAL_IN_BEAM_SEARCH: tuple[tuple[str, object], ...] = (
    ("temperature", 0.0),
    ("top_p", 1.0),
    ("top_k", 0),
    ("min_p", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("seed", None),
    ("logit_bias", {}),
    ("constraint", None),
    ("thinking", None),
    ("prompt_logprobs", None),
    ("stop", ()),
    ("include_stop_str_in_output", False),
)

SAMPLING_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("best_of", 1, 128),
    ("length_penalty", -10.0, 10.0),
    ("max_tokens", 1, MOST_TOKENS),
    ("min_tokens", 0, MOST_TOKENS),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 2**31),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
    ("logprobs", 0, MOST_LOGPROBS),
    ("prompt_logprobs", 0, MOST_LOGPROBS),
    ("seed", -(2**63), 2**64 - 1),
)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """SamplingParams with all defaults filled in: the sampling settings of one sequence in the engine."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()  # empty under ignore_eos
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    return_progress: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence for the engine. `group`: common id of the n sequences of a request, which share the prompt."""

    id: str
    tokens: list[int]
    sampling: Sampling
    priority: int = 0  # lower values run first
    group: str = ""
    salt: str = ""  # requests share cached prefixes only if their salts are equal


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logprob of a token, and the most likely tokens at its position as (token, logprob), best first.

    Logprobs are of the model's own distribution: before penalties, bias, temperature, top-k, top-p and min-p.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens of a prompt are computed; `cached` of them came from the prefix cache. Tokens that pass the
    layers together count by the fraction of the layers that they have passed."""

    computed: int
    cached: int


class PromptExperts(msgspec.Struct, frozen=True, array_like=True):
    """Which processor computed the experts in RAM for a prompt, in prompt tokens: `streamed` with experts that were
    copied to the GPU, `cpu` with experts that the CPU computed.

    A step may divide its experts between both, and may have tokens of several prompts. Each token then counts by the
    fraction of the step's experts in RAM that were copied, whichever experts the router chose for it.
    """

    streamed: int
    cpu: int


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one engine step for one sequence: zero or more new tokens, and `finish` if the sequence ended."""

    id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # only with the first token; [0] is None
    cached_tokens: int | None = None  # prompt tokens from the prefix cache; only with the first token
    prompt_experts: PromptExperts | None = None  # only with the first token, where a GPU has experts in RAM
    finish: FinishReason | None = None
    error: str = ""  # the message if finish is "error"
    stop_token: int | None = None  # the eos or stop token that ended the sequence; not in `tokens`
    progress: Progress | None = None  # of a prompt that is not complete; such an event has nothing else


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in OpenAI's message format, to be rendered with the checkpoint's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed answer; its text is final.

    `text` may be empty while an incomplete UTF-8 character or a possible stop string is held back. `logprobs` has one
    entry per token of `tokens`. `finish` is set on the choice's last chunk.
    """

    index: int = 0  # which of the n choices
    text: str = ""
    markers: list[int] = []  # ascending offsets in `text` at which the text of a special token begins
    tokens: list[int] = []
    ends: list[int] = []  # of each token, the offset in `text` behind the last character that it added to
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    error: str = ""  # the message if finish is "error"
    stop_reason: str | int | None = None  # the stop string or stop token id that matched, None for eos
    prompt_tokens: list[int] | None = None  # on each choice's first chunk
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int | None = None
    prompt_experts: PromptExperts | None = None
    progress: Progress | None = None  # such a chunk has nothing else
    score: float | None = None  # of the answer; only in beam search, on the last chunk


class Decision(msgspec.Struct, frozen=True):
    """One row of the start-up table: a setting, the requested value, the chosen value, and the reason."""

    name: str
    asked: str
    got: str
    why: str
