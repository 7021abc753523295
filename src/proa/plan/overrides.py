"""`--override-config KEY=JSON` -> config keys to replace. Never: knowing which keys exist."""

from __future__ import annotations

import json
from collections.abc import Iterable

from proa.errors import UsageError


def config_overrides(asked: Iterable[str]) -> dict[str, object]:
    """{"rope_theta": 1000000.0} of ("rope_theta=1e6",). Raises UsageError where it is not KEY=JSON."""
    overrides: dict[str, object] = {}
    for text in asked:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--override-config {text} has no key and value.", "Write --override-config KEY=JSON.")
        try:
            overrides[key] = json.loads(value)
        except ValueError as error:
            remedy = f"Quote texts twice: --override-config '{key}=\"text\"'."
            raise UsageError(f"--override-config {key}: {value} is not JSON ({error}).", remedy) from error
    return overrides
