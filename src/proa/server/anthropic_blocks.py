"""Content blocks of Anthropic's requests: text, documents as text, reasoning, tool calls and their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from proa.server.schema import NestedObject


def as_blocks(value: Any) -> Any:
    """Convert a string to a list of one text block; pass a list through. Raises ValueError for other types."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("Send a string or a list of content blocks")
    return value


def _kind(value: dict[str, Any]) -> str:
    """Return the tag of a block's class; errors.field_path leaves tags out."""
    return f"#{value['type']}"


def _supported(*kinds: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ValueError('A content block must have the form {"type": "text", "text": "..."}')
        if kind not in kinds:
            raise ValueError(f"Content blocks of type {kind!r} are not supported here; use {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


class Block(NestedObject):
    """A content block."""

    cache_control: Any = None  # without effect: prefixes are always cached

    def parts(self) -> Iterator[tuple[str, Block]]:
        """Yield nested blocks with their paths."""
        yield from ()


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Any = None  # without effect: clients send earlier answers back unchanged


class TextSource(NestedObject):
    """The content of a document: a text, or text blocks."""

    type: Literal["text", "content"]
    data: str = ""
    content: list[TextBlock] = Field(default=[])

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)


class DocumentBlock(Block):
    """A document, which the model reads as text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None
    citations: Any = None  # without effect: answers have no citations

    @field_validator("source", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in ("text", "content"):
            raise ValueError(f"Documents with a source of type {kind!r} are not supported; send their text")
        return value

    @property
    def text(self) -> str:
        body = self.source.data or "\n".join(block.text for block in self.source.content)
        return "\n".join(part for part in (self.title, self.context, body) if part)


class SearchResultBlock(Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None

    @property
    def text(self) -> str:
        return "\n".join([f"{self.title} ({self.source})", *(block.text for block in self.content)])


class ThinkingBlock(Block):
    """Reasoning of an earlier answer. The signature is checked for its form only: reasoning is not secret here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", pattern=r"^[A-Za-z0-9+/=_.:-]*$")


class RedactedThinkingBlock(Block):
    """Reasoning that another server has encrypted: it cannot be read, and is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    caller: Any = None  # without effect: all tools are the client's


TextLike = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[DocumentBlock, Tag("#document")]
    | Annotated[SearchResultBlock, Tag("#search_result")],
    Discriminator(_kind),
    _supported("text", "document", "search_result"),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: list[TextLike] = Field(default=[])
    is_error: bool = False

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)

    def parts(self) -> Iterator[tuple[str, Block]]:
        for i, block in enumerate(self.content):
            yield f"content[{i}]", block

    @property
    def text(self) -> str:
        text = "\n".join(block.text for block in self.content)
        return f"Error: {text}" if self.is_error else text


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[DocumentBlock, Tag("#document")]
    | Annotated[SearchResultBlock, Tag("#search_result")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")],
    Discriminator(_kind),
    _supported("text", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
