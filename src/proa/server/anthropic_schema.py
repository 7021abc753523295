"""Request schemas of Anthropic's endpoints. Unsupported fields are in fields.py, sampling ranges in types.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from proa.server.anthropic_blocks import AnyBlock, TextBlock, as_blocks
from proa.server.constraints import READERS
from proa.server.schema import MAX_STOP_CHARACTERS, MAX_STOPS, ApiRequest, GeneratingRequest, NestedObject
from proa.types import Constraint


class Turn(NestedObject):
    """One message; a string `content` becomes a list of one text block."""

    role: Literal["user", "assistant", "system"]
    content: list[AnyBlock] = Field(min_length=1)

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)


class Tool(NestedObject):
    """A tool of the client's, or (with another type than "custom") one that Anthropic's servers would run."""

    type: str | None = None
    name: str | None = Field(None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None  # these four are without effect: see `unknown_options`
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    allowed_callers: Any = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _complete(self) -> Tool:
        if self.is_custom and (self.name is None or self.input_schema is None):
            raise ValueError("A tool needs name and input_schema")
        return self


class ToolChoice(NestedObject):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('name belongs to type "tool"')
        return self


class Thinking(NestedObject):
    """Whether the model reasons first, by variables of the chat template."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens is missing")
        return self


class OutputConfig(NestedObject):
    effort: str | None = None  # without effect
    format: dict[str, Any] | None = None
    task_budget: Any = None  # without effect


class CountTokensRequest(ApiRequest):
    """POST /v1/messages/count_tokens: the conversation."""

    endpoint = "messages"

    messages: list[Turn] = Field(min_length=1)
    system: list[TextBlock] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        return as_blocks(value)

    @property
    def unknown_options(self) -> list[str]:
        return [f"{path}.{name}" for path, part in self._parts() for name in part.model_extra or {}]

    @property
    def unused_options(self) -> list[str]:
        """Known fields that have no effect."""
        unused = [f"tools[{i}]" for i, tool in enumerate(self.tools) if not tool.is_custom]
        has_budget = self.thinking is not None and self.thinking.type == "enabled"
        names = {
            "thinking": (self.thinking, ("display",) if has_budget else ("budget_tokens", "display")),
            "output_config": (self.output_config, ("effort", "task_budget")),
        }
        for path, (part, fields) in names.items():
            unused += [f"{path}.{name}" for name in fields if getattr(part, name, None) is not None]
        marked = any(getattr(part, "cache_control", None) is not None for _, part in self._parts())
        return [*unused, "cache_control"] if marked else unused

    def _parts(self) -> Iterator[tuple[str, BaseModel]]:
        for name in ("tool_choice", "thinking", "output_config"):
            if (part := getattr(self, name)) is not None:
                yield name, part
        for i, text in enumerate(self.system):
            yield f"system[{i}]", text
        for i, tool in enumerate(self.tools):
            if tool.is_custom:
                yield f"tools[{i}]", tool
        for i, turn in enumerate(self.messages):
            yield f"messages[{i}]", turn
            for j, block in enumerate(turn.content):
                yield f"messages[{i}].content[{j}]", block
                for path, nested in block.parts():
                    yield f"messages[{i}].content[{j}].{path}", nested


class MessagesRequest(GeneratingRequest, CountTokensRequest):
    """POST /v1/messages."""

    budget_field = "thinking.budget_tokens"

    max_tokens: int
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_STOPS)
    ] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning; None: any number."""
        return self.thinking.budget_tokens if self.thinking is not None and self.thinking.type == "enabled" else None

    @property
    def constraint(self) -> Constraint | None:
        """What constrains the answer's text. Raises RequestError."""
        form = self.output_config.format if self.output_config is not None else None
        return None if form is None else READERS["response_format"](form, "output_config.format")
