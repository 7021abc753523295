"""Suggests the nearest known name for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

REPLACED = {"prefill_share": "max_itl"}  # options that no longer exist, and what replaces them


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean --context?", or "" if no known name is similar. Ignores case and the difference of - and
    _."""
    plain = {_plain(k): k for k in known}
    if (new := REPLACED.get(_plain(name))) in plain:
        return f"{plain[new]} replaces it."
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    return f"Did you mean {plain[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")
