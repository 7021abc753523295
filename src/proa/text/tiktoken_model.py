"""Reads tiktoken.model of Moonshot's models (Kimi-K2, Moonlight) into the `tokenizers` library: their tokenizer class,
TikTokenTokenizer, is Python code beside the checkpoint. Never: other classes, which split text otherwise.

The file has a line for each token: its bytes in base64, and its rank, which is its id. Of two neighbours, those are
merged whose bytes together have the lowest rank.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from proa.errors import TokenizerError
from proa.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from proa.text.token_bytes import byte_alphabet
from proa.weights.placeholder import placeholder

CLASS = "TikTokenTokenizer"
_RESERVED = 256  # ids of special tokens behind the ranks; those without a name are called <|reserved_token_ID|>


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the tokens of a tiktoken.model file, in the order of their ranks. Raises TokenizerError."""
    if missing := placeholder(path):
        raise TokenizerError(*missing)
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}.", "Download it again.") from error
    if sorted(ranks.values()) != list(range(len(lines))) or any(bytes((byte,)) not in ranks for byte in range(256)):
        raise TokenizerError(f"{path} lacks a byte or a rank.", "Download it again.")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def build_backend(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """Build a backend that encodes like tiktoken, without special tokens."""
    spelled = {byte: char for char, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(map(spelled.__getitem__, token))

    merges = [
        (spell(token[:i]), spell(token[i:]))
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = PRE_TOKENIZERS["kimi-k2"]()
    backend.decoder = decoders.ByteLevel()
    return backend


def special_tokens(num_ranks: int, named: Mapping[str, Any]) -> dict[str, Any]:
    """Complete added_tokens_decoder with the reserved tokens that it does not name."""
    ids = range(num_ranks, num_ranks + _RESERVED)
    reserved = {str(i): {"content": f"<|reserved_token_{i}|>", "special": True} for i in ids}
    return reserved | dict(named)
