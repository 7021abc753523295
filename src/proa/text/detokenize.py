"""Incremental detokenisation: tokens in, complete characters out."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container


class Detokenizer:
    """Incremental detokeniser, O(1) amortised per token; never emits an incomplete UTF-8 character.

    Invalid bytes become U+FFFD; an incomplete character at the end does so only at `flush`. The concatenated pieces
    equal the text of all tokens decoded at once. `from_start` drops the leading space that sentencepiece adds to a
    text; leave it out for text that continues a prompt.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skip: Container[int] = frozenset(),
        *,
        from_start: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._drop_space = from_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_partial = False  # bytes of an incomplete character are held back

    def feed(self, token: int) -> str:
        """Add one token; return the characters that it completes, possibly none."""
        if token in self._skip:
            return ""
        data = self._token_bytes(token)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        if not self.has_partial and data.isascii():
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self.has_partial = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """End the text: return U+FFFD for an incomplete character, else an empty string."""
        self.has_partial = False
        return self._utf8.decode(b"", final=True)
