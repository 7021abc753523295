"""A parameter handed to workers as far as there is room for it, part by part. Never: which rows, doing the jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from proa.native.fill import Fill, StoredRows
from proa.ops.table import Sink


def in_parts(
    target: Sink, rows: StoredRows, make_room: Callable[[], None], begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, Sequence[Fill]]]:
    """(first row, rows, jobs) until `target` is covered from row `begin`, which is the first of `rows`, to row `end` or
    its last; nothing where only `write` fills it.

    make_room: does all jobs handed out so far, and empties what they filled. Raises ValueError where a part found room
    and the next does not.
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
            raise ValueError(f"there is room for {first} rows of {target.shape}, but not for the next")
        else:
            return
