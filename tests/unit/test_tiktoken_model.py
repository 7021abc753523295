"""tiktoken.model of Moonshot's models: tokens by rank, reserved special tokens, damaged files."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest

from proa.errors import TokenizerError
from proa.text.tokenizer import Tokenizer

MERGED = ["he", "ll", "hell", "lo", "hello", " w", "or", "orld", " world", "中", "中文", "123", "'s", "ello"]
RANKS = {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *(t.encode() for t in MERGED)])}
FIRST = len(RANKS)  # id of the first special token


def write(folder: Path, **config: object) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {
        str(FIRST + i): {"content": text, "special": True} for i, text in ((0, "[BOS]"), (1, "[EOS]"), (9, "<|u|>"))
    }
    about = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def by_rank(word: str) -> list[int]:
    """Encode by definition: the word if it is a token, else merge the pair of lowest rank, leftmost first."""
    data = word.encode()
    if data in RANKS:
        return [RANKS[data]]
    parts = [bytes([byte]) for byte in data]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    "words",
    [
        ["hello", " world"],
        ["hell", "中文", "o"],
        ["hellos", " 中", "中文字"],
        ["x's", " ", "123", "4"],
        ["😀\n", " worlds"],
    ],
)
def test_words_are_encoded_by_rank(tmp_path: Path, words: list[str]) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    text = "".join(words)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == [token for word in words for token in by_rank(word)]


def test_special_tokens_without_a_name_are_reserved(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    text = f"<|u|>hello<|reserved_token_{FIRST + 2}|>[EOS]"
    assert tokenizer.encode(text) == [FIRST + 9, RANKS[b"hello"], FIRST + 2, FIRST + 1]
    assert tokenizer.decode(tokenizer.encode(text)) == "hello"
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ({FIRST + 1}, FIRST + 256)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[: len(data) // 2], "lacks a byte|cannot be read"),
        (lambda data: data.replace(b" 17\n", b" 18\n"), "lacks a byte or a rank"),
        (lambda data: b"no ranks", "cannot be read"),
        (lambda data: b"", "is empty"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: object, says: str) -> None:
    path = write(tmp_path) / "tiktoken.model"
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(TokenizerError, match=f"tiktoken.model ({says})"):
        Tokenizer.load(tmp_path)


def test_other_classes_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json and cannot be converted"):
        Tokenizer.load(
            write(tmp_path, tokenizer_class="OtherTokenizer", auto_map={"AutoTokenizer": ["other.Other", None]})
        )
