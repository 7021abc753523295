"""`did_you_mean`: the nearest known name for a misspelt one. Never: messages beyond that sentence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "Did you mean --context?", or "" where nothing is near. Case and -/_ do not count as differences."""
    plain = {_plain(k): k for k in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    return f"Did you mean {plain[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")
