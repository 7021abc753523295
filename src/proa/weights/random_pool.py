"""A pool of random numbers, made once and copied from random offsets, so that filling weights runs at memory speed.
Never: scaling or packing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proa.native.fill import Fill
from proa.native.formats import PANEL_ROWS

POOL = 1 << 22  # elements


@dataclass(frozen=True)
class Copied:
    """Rows [low, high) of a job, taken from a copy that begins at element `start` of the pool, after its first `before`
    rows."""

    low: int
    high: int
    start: int
    before: int


def rows_at_once(columns: int) -> int:
    """Rows of one copy from the pool: whole panels, as packed weights need."""
    return max(1, POOL // 2 // columns // PANEL_ROWS) * PANEL_ROWS


def offset(first: int, count: int, seed: int) -> int:
    """Index in the pool of the `count` numbers that rows from `first` on are copied from."""
    return (seed % (POOL // 2) + first * 7919) % (POOL - count) if count < POOL else 0


def copies(job: Fill, row_bytes: int, shape: tuple[int, ...], seed: int) -> Iterator[Copied]:
    """Split a job, whose rows are counted from address 0 with `row_bytes` each, where another copy of the pool begins;
    the result does not depend on how the matrix was split into jobs."""
    rows, columns = shape
    per_copy, begin = rows_at_once(columns), job.rows.start // row_bytes
    for first in range(begin // per_copy * per_copy, begin + job.to.rows, per_copy):
        low, high = max(first, begin), min(first + per_copy, begin + job.to.rows)
        start = offset(first, min(per_copy, rows - first) * columns, seed)
        yield Copied(low - begin, high - begin, start, low - first)
