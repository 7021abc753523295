"""Small tokenizer.model files, written byte by byte. Never: tests."""

from __future__ import annotations

import struct

from proa.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

BYTE = 6

# Scores order the merges: "▁th" before "he", so that "▁the" is ▁th + e.
PIECES: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)),
    ("▁t", -1.0, NORMAL),
    ("▁th", -2.0, NORMAL),
    ("he", -3.0, NORMAL),
    ("▁the", -4.0, NORMAL),
    ("▁▁", -5.0, NORMAL),
    *((char, -100.0 - i, NORMAL) for i, char in enumerate("▁theax")),
    ("[INST]", 0.0, USER_DEFINED),
]


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_proto(
    model_type: int = 2, charsmap: bytes = b"", dummy_prefix: int = 1, *, single_spaces: int | None = 0,
    escapes: int = 1, space_last: int = 0,
) -> bytes:  # fmt: skip
    """single_spaces: None leaves the field out, which means 1."""
    pieces = b"".join(
        field(1, field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, kind))
        for text, score, kind in PIECES
    )
    normalizer = field(1, b"identity") + (field(2, charsmap) if charsmap else b"") + field(3, dummy_prefix)
    normalizer += (b"" if single_spaces is None else field(4, single_spaces)) + field(5, escapes)
    trainer = field(3, model_type) + field(4, len(PIECES)) + field(24, space_last)
    return pieces + field(2, trainer) + field(3, normalizer)


SP_TEXTS = ("the the", "  the axe", "ü😀 the\n", "tttheee   t")
