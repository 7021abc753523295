"""Random numbers made once and copied from random offsets: filling runs at memory speed. Never: what they become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proa.native.fill import Fill
from proa.native.formats import PANEL_ROWS

POOL = 1 << 22  # numbers


@dataclass(frozen=True)
class Copied:
    """Rows [low, high) of a job: they follow `before` others of a copy that begins at number `start` of the pool."""

    low: int
    high: int
    start: int
    before: int


def rows_at_once(columns: int) -> int:
    """Rows copied from the pool in one go: whole panels, so that packed weights take them."""
    return max(1, POOL // 2 // columns // PANEL_ROWS) * PANEL_ROWS


def offset(first: int, count: int, seed: int) -> int:
    """Where the `count` numbers begin that rows from `first` on are copied from."""
    return (seed % (POOL // 2) + first * 7919) % (POOL - count) if count < POOL else 0


def copies(job: Fill, row_bytes: int, shape: tuple[int, ...], seed: int) -> Iterator[Copied]:
    """A job whose rows are counted from address 0, `row_bytes` each, cut where another copy begins: it does not matter
    how a matrix was cut into jobs.
    """
    rows, columns = shape
    per_copy, begin = rows_at_once(columns), job.rows.start // row_bytes
    for first in range(begin // per_copy * per_copy, begin + job.to.rows, per_copy):
        low, high = max(first, begin), min(first + per_copy, begin + job.to.rows)
        start = offset(first, min(per_copy, rows - first) * columns, seed)
        yield Copied(low - begin, high - begin, start, low - first)
