"""Read a request body as a JSON object: checks media type, size, UTF-8 and JSON syntax."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from proa.obs.units import format_bytes
from proa.server.errors import ApiError
from proa.server.sse import ClientGoneError

MAX_BODY_BYTES = 32 * 1024 * 1024  # a million tokens are about 5 MB of text or 7 MB of token ids
_MAX_DISCARDED_BYTES = 8 * MAX_BODY_BYTES


async def read_body(request: Request) -> list[bytes]:
    """Read the request's body, in parts. Raises ApiError 413 or 415; ClientGoneError if the upload is cut off."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # Blocks cross-origin pages too, whose browser asks first (CORS preflight) for this media type alone. Browsers send
    # Origin; other clients may leave the media type out, as litellm does with Ollama's endpoints.
    left_out = not media_type and not {"origin", "sec-fetch-site"} & set(request.headers.keys())
    if media_type != "application/json" and not left_out:
        has = f"has media type {media_type}" if media_type else "has no media type"
        message = f"The body {has}; send application/json (curl: -H 'Content-Type: application/json')."
        raise ApiError(415, "unsupported_media_type", message)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"The body has content encoding {encoding!r}; send it uncompressed."
        raise ApiError(415, "unsupported_encoding", message)
    try:
        return await _read(request)
    except ClientDisconnect as error:
        raise ClientGoneError from error


async def _read(request: Request) -> list[bytes]:
    """Read the whole body. Of a body that is too large, read and discard up to _MAX_DISCARDED_BYTES before the 413:
    a client that is still sending does not read the response."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_DISCARDED_BYTES:
            break
        parts.append(part)
        if size > MAX_BODY_BYTES:
            parts.clear()
    if size > MAX_BODY_BYTES:
        limit = format_bytes(MAX_BODY_BYTES)
        raise ApiError(413, "body_too_large", f"The body is larger than the limit of {limit}.")
    return parts


def decode(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ApiError 400."""
    if not body:
        raise ApiError(400, "invalid_json", "The body is empty; a JSON object is expected.")
    try:
        body.decode("utf-8")  # msgspec reports the position relative to one string, not to the body
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        message = f"The body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}."
        raise ApiError(400, "invalid_utf8", message) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "The body's JSON is nested too deeply.") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ApiError(400, "invalid_json", f"The body is a JSON {kind}; an object is expected.")
    return value
