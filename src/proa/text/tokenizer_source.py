"""The result of the tokenizer readers hf_tokenizer.py and gguf_tokenizer.py: backend, templates, special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from proa.errors import TokenizerError


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer as read from a checkpoint.

    `backend`: ready to encode. `templates`: chat templates by name, possibly empty. `special_tokens`: text of
    bos_token, eos_token, ..., for the templates. `eos_token_ids`: union over all of the tokenizer's files.
    """

    backend: tokenizers.Tokenizer
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()


def token_ids(*values: Any) -> frozenset[int]:
    """Return the union of eos_token_id values in the forms that checkpoints use: None, a number, a list of numbers."""
    lists: Iterable[Any] = (v if isinstance(v, list) else [v] for v in values)
    return frozenset(i for one in lists for i in one if isinstance(i, int) and not isinstance(i, bool))


def wrap_in(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Configure `backend` to add bos before and eos after a text that is encoded with special tokens. Raises
    TokenizerError if one of them is no token."""
    pieces = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    specials = [(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None]
    if missing := [text for text, number in specials if number is None]:
        raise TokenizerError(
            f"The tokenizer is to add {missing[0]!r} to each text, but its vocabulary has no such token.",
            "Correct bos_token, eos_token or add_bos_token, add_eos_token in tokenizer_config.json.",
        )
    backend.post_processor = TemplateProcessing(single=pieces, pair=[*pieces, "$B:1"], special_tokens=specials)
