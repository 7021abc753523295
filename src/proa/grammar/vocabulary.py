"""What a grammar needs to know of a tokenizer, in a form that crosses processes. Never: text, files, imports of
llguidance or numpy, which a server needs only for a grammar.
"""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """tokens: the bytes of each token id of the model, b"" for ids without a token. special: ids of special tokens.
    tokenizer: the tokenizer in the JSON format of the `tokenizers` library."""

    tokens: list[bytes]
    special: list[int]
    tokenizer: str
