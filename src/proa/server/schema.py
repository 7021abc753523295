"""Request schemas of OpenAI's endpoints: the implemented fields, their types and defaults. Sampling ranges are checked
in types.py; unsupported fields are listed in fields.py.

Types are strict, as with OpenAI: "5" is not a number, 1 is not a boolean. `None` means not given. Contradicting
fields raise RequestError, which names the one to change.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from proa.errors import RequestError
from proa.server.constraints import CONSTRAINING, constraint_of
from proa.server.fields import Endpoint
from proa.types import MOST_TOKENS, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chat answers may fill the context

MAX_STOPS = 64  # each stop string is matched against every generated character
MAX_STOP_CHARACTERS = 4096
_MAX_ID_DIGITS = 20

Prompt = str | list[int]
StopStrings = Annotated[  # one string stands for a list of it
    list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class ApiRequest(BaseModel):
    """Fields common to all requests. `endpoint`: its rows of the table in fields.py."""

    model_config = ConfigDict(strict=True, extra="forbid")
    endpoint: ClassVar[Endpoint]

    model: str | None = None

    @property
    def unknown_options(self) -> list[str]:
        """Paths of unknown keys inside nested fields, such as stream_options.wibble."""
        return []

    @property
    def unused_options(self) -> list[str]:
        """Paths of known fields that have no effect."""
        return []


class NestedObject(BaseModel):
    """An object inside a request. null means not given, as in fields.py. Unknown keys are collected and reported in a
    header."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None or name not in cls.model_fields}


class StreamOptions(NestedObject):
    """Usage reports in a stream. Unknown keys are collected and reported in a header."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GeneratingRequest(ApiRequest):
    """Fields common to all requests that generate text. `limits`: the fields that limit an answer's tokens;
    `budget_field`: the one that limits its reasoning."""

    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    budget_field: ClassVar[str] = ""

    stream: bool = False

    @property
    def is_empty(self) -> bool:
        """True if it asks for nothing but a loaded model."""
        return False

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning; None: any number."""
        return None

    def without_effect(self, params: SamplingParams) -> list[str]:
        """Name the token limits that were cut to the room left in the context, and the budget of reasoning if the model
        does not reason."""
        has_no_reasoning = self.thinking_budget is not None and params.thinking is None
        return [*self.cut_limits(params.max_tokens), *([self.budget_field] if has_no_reasoning else [])]

    def cut_limits(self, most_tokens: int | None) -> list[str]:
        """Name the limits that were cut to `most_tokens`, the room left in the context."""
        return [name for name in self.limits if most_tokens is not None and (getattr(self, name) or 0) > most_tokens]


class SampledRequest(GeneratingRequest):
    """Fields common to /v1/chat/completions and /v1/completions."""

    stream_options: StreamOptions | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
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
    stop: StopStrings = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[str, float] = {}
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024)

    @field_validator("top_k")
    @classmethod
    def _all_tokens(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value  # vLLM and SGLang write "no top-k" as -1

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not key.isascii() or not key.isdecimal() or len(key) > _MAX_ID_DIGITS:
                raise ValueError(f"{key[:_MAX_ID_DIGITS]!r} is not a token id")
        if len({int(key) for key in value}) < len(value):
            raise ValueError('A token id is given twice, such as "5" and "05"')
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.use_beam_search and self.stream:
            raise RequestError(
                "stream is true beside use_beam_search, whose answers are known only when the search has ended.",
                "Set stream to false.",
                param="stream",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given, but stream is not true.", "Set stream to true.", param="stream_options"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def unknown_options(self) -> list[str]:
        extra = self.stream_options.model_extra if self.stream_options is not None else None
        return [f"stream_options.{name}" for name in extra or {}]

    def sampling(self, **more: Any) -> SamplingParams:
        """Convert to SamplingParams; `more` overrides fields whose meaning differs between the endpoints.

        Raises RequestError for a value out of range.
        """
        same = {name: getattr(self, name) for name in SamplingParams.__struct_fields__ if name not in _CONVERTED}
        converted = {
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
            "constraint": constraint_of({name: getattr(self, name) for name in CONSTRAINING}),
        }
        return SamplingParams(**{**same, **converted, **more})


_CONVERTED = ("stop", "stop_token_ids", "logit_bias", "logprobs", "constraint", "thinking", "return_progress")


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions."""

    endpoint = "chat"
    limits = ("max_tokens", "max_completion_tokens")
    budget_field = "thinking_token_budget"

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)
    return_progress: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning; None: any number."""
        return self.thinking_token_budget

    @field_validator("thinking_token_budget")
    @classmethod
    def _without_budget(cls, value: int | None) -> int | None:
        return None if value == -1 else value  # vLLM's "no limit"

    @model_validator(mode="after")
    def _chat_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs is given, but logprobs is not true.", "Set logprobs to true.", param="top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                "max_tokens and max_completion_tokens differ.", "Send only one of them.", param="max_tokens"
            )
        if self.use_beam_search and self.thinking_token_budget is not None:
            raise RequestError(
                "thinking_token_budget is given beside use_beam_search, which reads no text.",
                "Send only one of them.",
                param="thinking_token_budget",
            )
        if self.functions is not None and self.tools is not None:
            raise RequestError("functions and tools are both given.", "Send tools only.", param="functions")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other.",
                    "Set one of them to false.",
                    param="continue_final_message",
                )
            self.add_generation_prompt = False
        return self


class CompletionRequest(SampledRequest):
    """POST /v1/completions. `prompt` is normalised to a list: one entry per prompt, text or token ids."""

    endpoint = "completions"

    prompt: list[Prompt]
    max_tokens: int | None = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        """Normalise a string, a list of strings, a list of token ids, or a list of such lists."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if _are(int, value):
                return [value]
            if _are(str, value) or all(isinstance(v, list) and v and _are(int, v) for v in value):
                return value
        raise ValueError("send a string, a list of strings, a list of token ids, or a list of such lists; none empty")


class TokenizeRequest(ApiRequest):
    """POST /tokenize: a prompt, or messages as for chat."""

    endpoint = "tokenize"

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(ApiRequest):
    """POST /detokenize."""

    endpoint = "tokenize"

    tokens: list[int]


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(v) is kind for v in values)  # not isinstance: a bool is not a token id
