"""Tokens -> text, piece by piece. Belongs here: whole characters only. Never: stop strings, requests."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container


class Detokenizer:
    """Incremental detokenisation, O(1) amortised per token; never emits half a UTF-8 character.

    Bytes that can no longer become a character come out as U+FFFD, an unfinished character at the end only at
    `flush`. The pieces concatenated are the text of all tokens together. `from_start` drops the space that
    sentencepiece writes in front of a text; leave it out for text that continues a prompt.
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

    def feed(self, token: int) -> str:
        """The characters that this token completes, maybe none."""
        if token in self._skip:
            return ""
        data = self._token_bytes(token)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    @property
    def has_partial(self) -> bool:
        """Whether bytes of an unfinished character are held back."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)
