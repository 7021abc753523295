"""Which implementation stands behind each op: chosen once at start, reported by name. Never: maths."""

from __future__ import annotations

from dataclasses import dataclass, fields

from proa.ops.reference import REFERENCE
from proa.ops.table import Ops


@dataclass(frozen=True)
class Chosen:
    ops: Ops
    names: dict[str, str]  # op -> implementation, for the start-up report


def select() -> Chosen:
    """The ops for this machine. Implementations other than the reference register here as they come."""
    return Chosen(REFERENCE, {field.name: "reference" for field in fields(Ops)})
