"""Names of the parameters that random weights quantise. Never: torch, making them."""

from __future__ import annotations

import re

_CODED = re.compile(
    r"blocks\.\d+\.(mixer\.([qkvo]|q_a|q_b|kv_a|qkvz|out)|ffn\.(shared\.|experts\.\d+\.)?(gate|up|down))\.weight"
)


def is_coded(name: str) -> bool:
    """True for routed experts and linear layers; embedding, head and routers are not quantised, as in published
    checkpoints."""
    return _CODED.fullmatch(name) is not None
