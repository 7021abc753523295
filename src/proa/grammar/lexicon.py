"""A vocabulary as llguidance reads it: the prefix tree of its tokens. Never: masks of grammars (matcher.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from proa.grammar.vocabulary import Vocabulary


class Lexicon:
    """A vocabulary as a prefix tree for llguidance. Building it takes about a second per 100 000 tokens.

    The grammar's own end of text is an extra token, `end`, after the model's last one: which of the model's tokens end
    an answer differs between requests.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.end = vocabulary.tokens, len(vocabulary.tokens)
        self.num_words = self.end // 32 + 1  # int32 words of a mask with a bit for each token and for `end`
        self.special = {self.tokens[token].decode("utf-8", "replace"): token for token in vocabulary.special}
        self.existing = bits_of((i for i, token in enumerate(self.tokens) if token), self.num_words)
        self._tokens_of: dict[bytes, list[int]] = {}
        adapter = _Adapter(vocabulary)
        self.tree = LLTokenizer(adapter, eos_token=self.end)
        adapter.by_longest = self.tree.greedy_tokenize

    def tokens_of(self, text: bytes) -> list[int]:
        """Return the tokens whose bytes equal `text`."""
        if text not in self._tokens_of:
            self._tokens_of[text] = [i for i, token in enumerate(self.tokens) if token == text]
        return self._tokens_of[text]


def bits_of(tokens: Iterable[int], num_words: int) -> NDArray[np.int32]:
    """Return a mask with the bits of these tokens: token t is bit t % 32 of word t // 32."""
    flags = np.zeros(32 * num_words, np.uint8)
    flags[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class _Adapter(TokenizerWrapper):
    """The attributes that llguidance reads of a tokenizer. It calls the object to find the usual tokens of a text that
    a grammar forces, which are then the only ones allowed. Their bytes must be those of the text."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_token_id, self.eos_token_id = None, len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        self._json = vocabulary.tokenizer
        self.by_longest: Callable[[str], list[int]] = lambda text: []  # until the tree is built

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._json)
        backend.encode_special_tokens = True  # special tokens inside a text are plain text
        return backend

    def __call__(self, s: str) -> list[int]:
        ids: list[int] = self._backend.encode(s, add_special_tokens=False).ids
        same = b"".join(self.tokens[token] for token in ids) == s.encode()
        return ids if same else self.by_longest(s)  # sentencepiece puts a space before a text
