"""Request schema of /v1/responses. Unsupported fields are in fields.py, items of `input` in responses_prompt.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from proa.server.constraints import READERS
from proa.server.schema import GeneratingRequest, NestedObject
from proa.types import MOST_TOKENS, Constraint

ENCRYPTED_REASONING = "reasoning.encrypted_content"
USABLE_TOOLS = ("function", "custom", "namespace")

# The client's own, returned in the response. The limits are OpenAI's.
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ReasoningConfig(NestedObject):
    effort: str | None = None
    summary: str | None = None  # without effect: reasoning is sent whole


class TextConfig(NestedObject):
    format: dict[str, Any] | None = None
    verbosity: str | None = None  # without effect


class ResponsesRequest(GeneratingRequest):
    """POST /v1/responses. A string `input` becomes a list of one user message."""

    endpoint = "responses"
    limits = ("max_output_tokens",)

    input: list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Metadata = Field(default_factory=dict, max_length=16)
    stream_options: dict[str, Any] | None = None  # without effect: no padding is added to events

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @property
    def constraint(self) -> Constraint | None:
        """What constrains the answer's text. Raises RequestError."""
        form = self.text.format if self.text is not None else None
        return None if form is None else READERS["response_format"](form, "text.format")

    @property
    def unknown_options(self) -> list[str]:
        parts = {"reasoning": self.reasoning, "text": self.text}
        return [f"{path}.{name}" for path, part in parts.items() if part for name in part.model_extra or {}]

    @property
    def unused_options(self) -> list[str]:
        unused = [f"tools[{i}]" for i, tool in enumerate(self.tools) if tool.get("type") not in USABLE_TOOLS]
        unused += [f"include[{i}]" for i, name in enumerate(self.include) if name != ENCRYPTED_REASONING]
        if self.reasoning is not None and self.reasoning.summary is not None:
            unused.append("reasoning.summary")
        if self.text is not None and self.text.verbosity is not None:
            unused.append("text.verbosity")
        if self.truncation == "auto":
            unused.append("truncation")
        return unused
