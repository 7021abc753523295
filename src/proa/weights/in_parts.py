"""Splits a parameter into fill jobs that fit the room of its sink. Never: which rows, running the jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from proa.native.fill import Fill, StoredRows
from proa.ops.table import Sink


def in_parts(
    target: Sink, rows: StoredRows, make_room: Callable[[], None], begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, Sequence[Fill]]]:
    """Yield (first row, number of rows, jobs) that cover `target` from row `begin` to `end` (None: its last); `rows`
    are the stored rows from `begin` on. Yields nothing if the sink has no jobs and can only be filled by `write`.

    make_room: must run all jobs yielded so far and empty the staging that they filled. Raises ValueError if one part
    fitted and the next does not.
    """
    whole, unit = target.shape[0] if len(target.shape) == 2 else 1, target.row_unit
    total = whole if end is None else end
    first, step = begin, total - begin
    while first < total:
        count = min(step, total - first)
        jobs = target.fills(rows.after(first - begin), first, count)
        if jobs is None:
            make_room()
            jobs = target.fills(rows.after(first - begin), first, count)
        if jobs is not None:
            yield first, count, jobs
            first += count
        elif step > unit:
            step = max(unit, step // 2 // unit * unit)
        elif first > begin:
            raise ValueError(f"the sink took {first} rows of {target.shape}, but has no room for the next")
        else:
            return
