"""The place of a parameter in a checkpoint. Never: finding it, I/O, torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from proa.native.formats import PANEL_ROWS, Order, stored_facts, stored_types
from proa.weights.index import TensorInfo

AWQ_ROWS = 8  # rows whose values share an int32 word


@dataclass(frozen=True, slots=True)
class Source:
    """A rectangle of a stored tensor, seen as [rows, columns] with all dimensions but the last flattened to rows.

    transposed: the rectangle is [in, out], the parameter [out, in]. row_step, col_step: stride in the stored tensor's
    rows and columns. changed: the file's function of the parameter's values, see NameTable.changed; "" if none.
    """

    tensor: str
    first_row: int
    rows: int
    first_col: int
    cols: int
    transposed: bool = False
    row_step: int = 1
    col_step: int = 1
    changed: str = ""

    @property
    def height(self) -> int:
        """The parameter's rows."""
        return self.cols if self.transposed else self.rows

    @property
    def width(self) -> int:
        """The parameter's columns."""
        return self.rows if self.transposed else self.cols

    def part(self, rows: range, columns: range | None) -> Source:
        """The part of the parameter with these rows and columns (None: all)."""
        columns = range(self.width) if columns is None else columns
        down, across = (columns, rows) if self.transposed else (rows, columns)
        return replace(
            self, first_row=self.first_row + down.start * self.row_step, rows=len(down),
            first_col=self.first_col + across.start * self.col_step, cols=len(across),
        )  # fmt: skip

    def whole_units(self, info: TensorInfo) -> bool:
        """True if the rectangle divides no word, block or group of the stored tensor, so that codes and scales can be
        read by themselves."""
        rows, columns = stored_units(info)
        ends = (self.first_col, self.first_col + self.cols)
        by_rows = rows == PANEL_ROWS or (self.first_row % rows == 0 and self.rows % rows == 0)
        return by_rows and all(end % columns == 0 or end == info.shape[-1] for end in ends)


def stored_units(info: TensorInfo) -> tuple[int, int]:
    """Rows and columns of a stored tensor between which it may be cut.

    Rows whose scales are shared are cut between panels: a packed panel has one row of scales.
    """
    of = info.quantised
    if of is None:
        known = stored_types().get(info.dtype)
        return 1, known.block_values if known else 1
    codes = stored_facts(of.code).block_values * (1 if of.order is Order.ROWS else 4)
    group = of.group if of.ordered and of.group else 1
    rows = AWQ_ROWS if of.order is Order.AWQ else PANEL_ROWS if of.scale_rows > 1 else 1
    return rows, lcm(codes, group)
