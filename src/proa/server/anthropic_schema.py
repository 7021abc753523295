"""Request schemas of Anthropic's endpoints. Unsupported fields are in fields.py, sampling ranges in types.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from proa.server.schema import MAX_STOP_CHARACTERS, MAX_STOPS, ApiRequest, GeneratingRequest


class TextBlock(BaseModel):
    """A text content block, the only supported type. Unknown keys are collected and reported in a header."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str
    cache_control: Any = None  # ignored: prefixes are always cached
    citations: Any = None  # ignored: clients send earlier answers back unchanged

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ValueError('A content block must have the form {"type": "text", "text": "..."}')
        if kind != "text":
            raise ValueError(f"Content blocks of type {kind!r} are not supported; send text blocks only")
        return value


class Turn(BaseModel):
    """One message; a string `content` becomes a list of one text block."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["user", "assistant", "system"]
    content: list[TextBlock] = Field(min_length=1)

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)


class CountTokensRequest(ApiRequest):
    """POST /v1/messages/count_tokens: the conversation."""

    messages: list[Turn] = Field(min_length=1)
    system: list[TextBlock] = Field(default_factory=list)

    @field_validator("system", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)

    @property
    def unknown_options(self) -> list[str]:
        return [f"{path}.{name}" for path, part in self._parts() for name in part.model_extra or {}]

    def _parts(self) -> Iterator[tuple[str, BaseModel]]:
        for i, block in enumerate(self.system):
            yield f"system[{i}]", block
        for i, turn in enumerate(self.messages):
            yield f"messages[{i}]", turn
            for j, block in enumerate(turn.content):
                yield f"messages[{i}].content[{j}]", block


class MessagesRequest(GeneratingRequest, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_STOPS)
    ] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def as_blocks(value: Any) -> Any:
    """Convert a string to a list of one text block; pass a list through. Raises ValueError for other types."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("Send a string or a list of text blocks")
    return value
