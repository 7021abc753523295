"""Response structs of Anthropic's API: the message and its stream events. anthropic.py fills them.

Each struct's `type` tag is also its server-sent event name.
"""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct):
    """Token counts. `input_tokens` excludes prompt tokens that came from the prefix cache."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """The complete response; in message_start, `content` is empty and the stop fields are null."""

    id: str
    model: str
    usage: Usage
    role: str = "assistant"
    content: list[TextBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    content_block: TextBlock
    index: int = 0


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    delta: TextDelta
    index: int = 0


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int = 0


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
