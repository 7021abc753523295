"""Response structs of Anthropic's API: the message and its stream events. anthropic.py fills them.

Each struct's `type` tag is also its server-sent event name.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Usage(msgspec.Struct):
    """Token counts. `input_tokens` excludes prompt tokens that came from the prefix cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """The complete response; in message_start, `content` is empty and the stop fields are null."""

    id: str
    model: str
    usage: Usage
    role: str = "assistant"
    content: list[AnyBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnyBlock


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    """Why generation stopped; `stop_sequence` is the stop string that matched."""

    stop_reason: str
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class ErrorDetails(msgspec.Struct):
    type: str
    message: str


class ErrorReply(msgspec.Struct, tag_field="type", tag="error"):
    """The body of an error response, and the event that ends a failed stream."""

    error: ErrorDetails
    request_id: str


StreamEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
