"""Prefixes for the names of nested parameters."""

from __future__ import annotations

from proa.ops.table import Parameters


def prefixed(prefix: str, parameters: Parameters) -> Parameters:
    return ((f"{prefix}.{name}", target) for name, target in parameters)
