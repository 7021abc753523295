"""`--override-config KEY=JSON` -> config keys to replace. Never: knowing which keys exist."""

from __future__ import annotations

import json
from collections.abc import Iterable

from proa.errors import UsageError


def config_overrides(asked: Iterable[str]) -> dict[str, object]:
    """Parse ("rope_theta=1e6",) to {"rope_theta": 1000000.0}. Raises UsageError for text that is not KEY=JSON."""
    overrides: dict[str, object] = {}
    for text in asked:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--override-config {text} is not KEY=JSON.", "Give --override-config KEY=JSON.")
        try:
            overrides[key] = json.loads(value)
        except ValueError as error:
            remedy = f"A text needs quotes inside the shell's: --override-config '{key}=\"text\"'."
            raise UsageError(f"--override-config {key}: {value} is not JSON ({error}).", remedy) from error
    return overrides
