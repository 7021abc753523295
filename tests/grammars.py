"""Compiled constraints over a small vocabulary, and random answers that follow them. Never: tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from proa.grammar.compile import compiled
from proa.grammar.lexicon import Lexicon
from proa.grammar.matcher import Matcher
from proa.grammar.thinking import ThinkingMatcher
from proa.grammar.vocabulary import Vocabulary
from proa.text.token_bytes import byte_alphabet
from proa.types import Constraint, Thinking

EOS, MARK = 0xFF, 0xFE
WORDS = ('{"', '":', "true", "null", "hello", "}}", "</think>", "\n  ", "12", "日本", '": "')
# Bytes that no UTF-8 has; their ids are free for tokens of several bytes.
_FREE = (0xC0, 0xC1, *range(0xF5, 0xFE))


@cache
def vocabulary(num_tokens: int) -> Vocabulary:
    """256 tokens: token b is byte b, but for WORDS and the special tokens <eos> and <mark>. Others have
    no token."""
    named = {"<eos>": EOS, "<mark>": MARK, **dict(zip(WORDS, _FREE, strict=True))}
    spelling = {byte: char for char, byte in byte_alphabet().items() if byte not in named.values()}
    backend = tokenizers.Tokenizer(models.BPE(vocab={**{spelling[b]: b for b in spelling}, **named}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<mark>", special=True)])
    backend.add_tokens(list(WORDS))
    texts = {token: text.encode() for text, token in named.items()}
    tokens = [texts.get(token, bytes([token])) for token in range(256)] + [b""] * (num_tokens - 256)
    return Vocabulary(tokens, [MARK, EOS], backend.to_str())


@cache
def lexicon(num_tokens: int = 288) -> Lexicon:
    return Lexicon(vocabulary(num_tokens))


def matcher(
    constraint: Constraint,
    *,
    min_tokens: int = 0,
    stops: Sequence[int] = (EOS,),
    num_tokens: int = 288,
) -> Matcher:
    known = lexicon(num_tokens)
    return Matcher(compiled(constraint, known.tree, known.special), known, stops, min_tokens)


def thinker(
    thinking: Thinking, constraint: Constraint | None = None, *, min_tokens: int = 0, num_tokens: int = 288
) -> ThinkingMatcher:
    inner = None if constraint is None else matcher(constraint, min_tokens=min_tokens, num_tokens=num_tokens)
    return ThinkingMatcher(thinking, lexicon(num_tokens), (EOS,), min_tokens, inner)


def allowed(mask: NDArray[np.int32]) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(lexicon().tokens[token] for token in tokens).decode()


def random_answer(follower: Matcher, draw: random.Random, most_tokens: int = 300) -> list[int] | None:
    """Random allowed tokens up to the end; None if it does not come within `most_tokens`. Tokens that close something
    are preferred after a while."""
    tokens: list[int] = []
    for count in range(most_tokens):
        free = allowed(follower.mask(tokens, 0))
        assert free, "a mask must allow a token"
        assert not follower.fault, follower.fault
        closing = (
            [token for token in free if token == EOS or lexicon().tokens[token][:1] in b'"]}'] if count > 40 else []
        )
        token = draw.choice(closing or free)
        if token == EOS:
            return tokens
        tokens.append(token)
    return None
