"""Request schemas of Ollama's endpoints. Fields that are not supported are in fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from proa.server.constraints import READERS
from proa.server.schema import ApiRequest, GeneratingRequest, NestedObject, StopStrings
from proa.types import MOST_TOKENS, Constraint

_NEUTRAL = {"tfs_z": 1.0, "typical_p": 1.0, "mirostat": 0}


def _no_images(value: list[Any] | None) -> list[Any] | None:
    if value:
        raise ValueError("Images are not supported")
    return value


NoImages = Annotated[list[Any] | None, AfterValidator(_no_images)]


class Options(NestedObject):
    """Sampling settings. Those of loading a model, such as num_ctx, have no effect."""

    num_predict: int | None = Field(default=None, le=MOST_TOKENS)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: StopStrings = Field(default=[])
    tfs_z: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None

    @field_validator("top_k")
    @classmethod
    def _all_tokens(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @field_validator("seed")
    @classmethod
    def _random(cls, value: int | None) -> int | None:
        return None if value == -1 else value  # Ollama's default, a new seed for each request

    @field_validator(*_NEUTRAL)
    @classmethod
    def _neutral(cls, value: float | None, info: Any) -> float | None:
        if value not in (None, _NEUTRAL[info.field_name]):
            raise ValueError(f"This sampler is not implemented; leave it out, or set it to {_NEUTRAL[info.field_name]}")
        return value


class Function(NestedObject):
    name: str
    arguments: dict[str, Any]


class Call(NestedObject):
    function: Function


class Message(NestedObject):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: NoImages = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None


class OllamaRequest(GeneratingRequest):
    """Fields common to /api/chat and /api/generate."""

    endpoint = "ollama"
    limits = ()

    stream: bool = True
    options: Options = Field(default_factory=Options)
    format: Any = None
    think: bool | str | None = None
    keep_alive: Any = None  # without effect: the model stays loaded

    @property
    def constraint(self) -> Constraint | None:
        """What constrains the answer's text: "json" or a schema. Raises RequestError."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return READERS["response_format"]({"type": "json_object"}, "format")
        return READERS["json_schema"](self.format, "format")

    @property
    def unknown_options(self) -> list[str]:
        return [f"options.{name}" for name in self.options.model_extra or {}]

    @property
    def unused_options(self) -> list[str]:
        return [] if self.keep_alive is None else ["keep_alive"]

    def cut_limits(self, most_tokens: int | None) -> list[str]:
        asked = self.options.num_predict or 0
        return ["options.num_predict"] if most_tokens is not None and asked > most_tokens else []

    @property
    def switches(self) -> dict[str, Any]:
        """The variables by which chat templates switch reasoning; a word is its effort."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), "thinking": bool(self.think), **effort}


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat. Without messages it asks whether the model is loaded."""

    messages: list[Message] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate. Without a prompt it asks whether the model is loaded."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    context: list[int] | None = None  # without effect: send the conversation
    images: NoImages = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    @property
    def unused_options(self) -> list[str]:
        return [*super().unused_options, *(["context"] if self.context else [])]


class OllamaShowRequest(ApiRequest):
    """POST /api/show; `name` is the older spelling of `model`."""

    endpoint = "ollama"

    name: str | None = None
    verbose: bool = False
