"""The exact bytes of every token, derived from the tokenizer's decoder.

Language model tokenizers decode each token to bytes independently: byte-level BPE encodes bytes as 256 printable
characters, sentencepiece writes a space as U+2581 and unknown bytes as <0xAB>. With the bytes known, detokenisation is
concatenation, and `bytes` in logprobs is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from proa.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each of the 256 characters of byte-level BPE (GPT-2's table): printable Latin-1 characters
    map to themselves, U+0100 onwards to the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes of a token by its id, computed on first use.

    `strips_leading_space`: decoding drops one space at the start of a text (sentencepiece prepends one to every text).
    Raises TokenizerError for an unsupported decoder.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._backend = backend
        self._spell, self.strips_leading_space = _read_decoder(decoder)
        self._bytes: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the token's bytes; b"" for an id without a token (an embedding may have more rows than tokens)."""
        known = self._bytes.get(token)
        if known is None:
            spelling = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if spelling is None else self._spell(spelling)
        return known


def _read_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """Parse tokenizer.json's "decoder"; return (function from a token's string to its bytes, True if a leading space
    is dropped)."""
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise TokenizerError(
            f"The tokenizer's decoder ({', '.join(sorted(unknown)) or 'missing'}) is not supported; Proa supports "
            "byte-level BPE and sentencepiece.",
            "Give another tokenizer with --tokenizer PATH.",
        )
    if "ByteLevel" in kinds:
        return _byte_level, False
    replacements: list[tuple[str, str]] = []
    strips = False
    for step in steps:
        if step["type"] == "Replace":
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips = step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip":
            strips = strips or (step["content"] == " " and step["start"] > 0)
    return _sentencepiece(replacements, "ByteFallback" in kinds), strips


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _flatten(step)]
    return [decoder]


_BYTE_OF = byte_alphabet()


def _byte_level(spelling: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in spelling)
    except KeyError:  # an added token, stored as plain text
        return spelling.encode("utf-8")


def _sentencepiece(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    def spell(spelling: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(spelling) if byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            spelling = spelling.replace(old, new)
        return spelling.encode("utf-8")

    return spell
