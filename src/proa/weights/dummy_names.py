"""Which random weights have a format of their own, by name. Never: torch, making them."""

from __future__ import annotations

import re

_CODED = re.compile(
    r"blocks\.\d+\.(mixer\.([qkvo]|q_a|q_b|kv_a|qkvz|out)|ffn\.(shared\.|experts\.\d+\.)?(gate|up|down))\.weight"
)


def is_coded(name: str) -> bool:
    """Routed experts and the linear layers beside them, as in published checkpoints: not the embedding, the head and
    what routes.
    """
    return _CODED.fullmatch(name) is not None
