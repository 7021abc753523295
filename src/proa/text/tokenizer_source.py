"""What a checkpoint's files say about its tokenizer. Belongs here: plain data. Never: reading, encoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True)
class TokenizerSource:
    """A backend ready to encode, and what stands beside it.

    `templates`: chat templates by name, {} if there are none. `special_tokens`: bos_token, eos_token, ... as
    text, for the templates. `eos_token_ids`: from all of the tokenizer's files.
    """

    backend: tokenizers.Tokenizer
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()


def token_ids(*values: Any) -> frozenset[int]:
    """Union of eos_token_id values as checkpoints write them: None, a number, or a list of numbers."""
    lists: Iterable[Any] = (v if isinstance(v, list) else [v] for v in values)
    return frozenset(i for one in lists for i in one if isinstance(i, int) and not isinstance(i, bool))


def wrap_in(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `backend` put bos before and eos after every text that is encoded with special tokens."""
    pieces = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
    specials = [(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None]
    backend.post_processor = TemplateProcessing(single=pieces, pair=[*pieces, "$B:1"], special_tokens=specials)
