"""Sentencepiece BPE as a backend of the `tokenizers` library, and a reader of tokenizer.model files.

tokenizer.model is a protobuf (sentencepiece's src/sentencepiece_model.proto). Only a few of its fields are needed, so
they are parsed here, without the packages protobuf and sentencepiece.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from proa.errors import TokenizerError
from proa.weights.placeholder import placeholder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # piece types; GGUF uses the same numbers
_BPE = 2


@dataclass(frozen=True)
class Pieces:
    """A sentencepiece vocabulary, indexed by token id. `space_first`: prepend a space to every text;
    `space_after_special`: also after every special token (transformers' legacy behaviour, and llama.cpp's);
    `single_spaces`: drop spaces at both ends of a text, and of several in a row all but one (OpenLLaMA v1)."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    space_first: bool = True
    space_after_special: bool = True
    single_spaces: bool = False


def build_backend(pieces: Pieces) -> tokenizers.Tokenizer:
    """Build a backend that encodes like sentencepiece; unknown characters become byte tokens."""
    texts = pieces.texts
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=_merges_by_score(pieces),
            unk_token=next((t for t, kind in zip(texts, pieces.types, strict=True) if kind == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    only_first = pieces.space_first and not pieces.space_after_special
    changes: list[normalizers.Normalizer] = []
    if pieces.single_spaces:  # Metaspace adds no space if there is one
        ends = r" +\z" if only_first else r"\A +| +\z"
        changes += [normalizers.Replace(Regex(ends), ""), normalizers.Replace(Regex(" +"), " ")]
    if only_first:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif pieces.space_first:
        changes.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if pieces.space_first else steps)
    add_special(backend, texts, pieces.types)
    return backend


def add_special(backend: tokenizers.Tokenizer, texts: list[str], types: list[int]) -> None:
    """Register the tokens that are matched as a whole in text: control tokens (special, skipped in decoding) and
    user-defined ones."""
    by_type = list(zip(texts, types, strict=True))
    special = [text for text, kind in by_type if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    own = [text for text, kind in by_type if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=False) for text in own])


def _merges_by_score(pieces: Pieces) -> list[tuple[str, str]]:
    """Derive the merges: every split of a piece into two pieces, highest score first, as sentencepiece merges.
    User-defined pieces, which sentencepiece does not divide, come first: those of several U+2581 stand for spaces."""
    score = {
        text: math.inf if kind == USER_DEFINED else score
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True)
        if kind in (NORMAL, USER_DEFINED)
    }
    merges = [
        (-score[text], text[:i], text[i:])
        for text in score
        for i in range(1, len(text))
        if text[:i] in score and text[i:] in score
    ]
    return [(left, right) for _, left, right in sorted(merges)]


def read_pieces(path: Path, *, space_after_special: bool) -> Pieces:
    """Read a tokenizer.model file. Raises TokenizerError if it is damaged or not plain BPE."""
    if missing := placeholder(path):
        raise TokenizerError(*missing)
    try:
        top = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(_bytes(value))) for number, value in top if number == 1]
        trainer, normalizer = (dict(_fields(_first(top, number))) for number in (2, 3))
        texts = [_bytes(piece[1]).decode("utf-8") for piece in pieces]
        scores = [struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0] for piece in pieces]
        types = [int(piece.get(3, NORMAL)) for piece in pieces]
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise TokenizerError(
            f"{path} cannot be read as a sentencepiece model ({type(error).__name__}: {error}).",
            "Download it again, or give a folder with a tokenizer.json with --tokenizer PATH.",
        ) from error
    # trainer 3: model type (1 unigram), 24: words end with their space; normalizer 2: compiled normalisation, 5: spaces
    # become U+2581
    if trainer.get(3) != _BPE or trainer.get(24) or normalizer.get(2) or not normalizer.get(5, True):
        raise TokenizerError(
            f"{path} is a sentencepiece unigram model, or one with text normalisation or unusual spaces; Proa reads "
            "only plain BPE.",
            "Give a folder with a tokenizer.json with --tokenizer PATH.",
        )
    space_first, single_spaces = (bool(normalizer.get(number, True)) for number in (3, 4))
    return Pieces(texts, scores, types, space_first, space_after_special, single_spaces)


def _first(fields: list[tuple[int, int | bytes]], number: int) -> bytes:
    return next((_bytes(value) for n, value in fields if n == number), b"")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field holds an integer instead of bytes")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; fixed-width values as raw bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"unknown protobuf wire type {kind} at byte {at}")
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(data):
            raise ValueError(f"the file ends inside the field at byte {at}")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
