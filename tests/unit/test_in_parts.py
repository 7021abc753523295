"""Splitting a parameter into fill jobs: whole, in as many parts as fit, or not at all."""

from __future__ import annotations

import pytest
from torch import Tensor

from proa.native.fill import Fill, StoredRows
from proa.native.formats import Format, Stored, layout
from proa.weights.in_parts import in_parts

ROW_BYTES = 64


class Room:
    """A sink with room for `room` rows until it is emptied; most_emptied: how often it can be emptied."""

    def __init__(self, shape: tuple[int, ...], rows: int, unit: int = 16, most_emptied: int = 1 << 30) -> None:
        self.shape, self.row_unit = shape, unit
        self._rows, self._left, self._most_emptied = rows, rows, most_emptied
        self.asked: list[tuple[int, int]] = []
        self.emptied = 0

    def expect(self, stored: str) -> None:
        pass

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> list[Fill] | None:
        assert count is not None
        self.asked.append((first, count))
        assert rows.start == 1000 + first * ROW_BYTES
        assert first % self.row_unit == 0
        if count > self._left:
            return None
        self._left -= count
        return [Fill(rows, layout(Format.BF16, count, 32), 0, 0)]

    def write(self, first: int, rows: Tensor) -> None:
        raise AssertionError("these rows are for workers")

    def empty(self) -> None:
        self.emptied += 1
        if self.emptied <= self._most_emptied:
            self._left = self._rows


def parts(sink: Room, begin: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    stored = StoredRows(Stored.BF16, 1000 + begin * ROW_BYTES, ROW_BYTES)
    found = []
    for first, count, jobs in in_parts(sink, stored, sink.empty, begin, end):
        assert [job.to.rows for job in jobs] == [count]
        found.append((first, count))
    return found


@pytest.mark.parametrize(
    ("shape", "room", "want", "emptied"),
    [
        ((100, 32), 100, [(0, 100)], 0),
        ((100, 32), 60, [(0, 48), (48, 48), (96, 4)], 2),  # 100 do not fit, nor 48 beside 48
        ((100, 32), 16, [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16), (80, 16), (96, 4)], 8),
        ((100, 32), 15, [], 3),  # not even a panel
        ((32,), 1, [(0, 1)], 0),  # a vector is one row
        ((32,), 0, [], 1),
    ],
)
def test_all_rows_once(shape: tuple[int, ...], room: int, want: list[tuple[int, int]], emptied: int) -> None:
    sink = Room(shape, room, unit=16 if len(shape) == 2 else 1)
    assert parts(sink) == want
    assert sink.emptied == emptied


def test_room_that_is_not_emptied() -> None:
    with pytest.raises(ValueError, match="took 48 rows"):
        parts(Room((100, 32), 60, most_emptied=1))


@pytest.mark.parametrize(
    ("rows", "room", "want"),
    [((0, 48), 100, [(0, 48)]), ((48, 100), 100, [(48, 52)]), ((32, 80), 30, [(32, 16), (48, 16), (64, 16)])],
)
def test_some_of_the_rows(rows: tuple[int, int], room: int, want: list[tuple[int, int]]) -> None:
    assert parts(Room((100, 32), room), *rows) == want
