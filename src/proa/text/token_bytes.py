"""The exact bytes of every token. Belongs here: reading a tokenizer's decoder as data. Never: streams, texts.

Tokenizers of language models decode token by token into bytes: byte-level BPE spells bytes with 256 printable
characters, sentencepiece spells a space as U+2581 and unknown bytes as <0xAB>. With the bytes known,
detokenisation is concatenation, and a token's `bytes` in log-probabilities are exact.
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
    """The 256 characters with which byte-level BPE spells bytes (GPT-2's table): printable Latin-1 stands for
    itself, the other bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """Bytes by token id, computed on first use.

    `strips_leading_space`: decoding from the start of a text drops one leading space (sentencepiece puts one
    before every text). Raises TokenizerError for a decoder Proa does not know.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._backend = backend
        self._spell, self.strips_leading_space = _read_decoder(decoder)
        self._bytes: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """The token's bytes; b"" for an id without a token (embeddings may be longer than the vocabulary)."""
        known = self._bytes.get(token)
        if known is None:
            spelling = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if spelling is None else self._spell(spelling)
        return known


def _read_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """tokenizer.json's "decoder" -> (a token's spelling -> its bytes, whether a leading space is dropped)."""
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise TokenizerError(
            f"The tokenizer's decoder is {', '.join(sorted(unknown)) or 'missing'}; Proa does not know it.",
            "Byte-level BPE and sentencepiece tokenizers work; give another one with --tokenizer PATH.",
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
    except KeyError:  # an added token written as plain text
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
