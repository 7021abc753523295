"""A parameter's place in a checkpoint. Never: finding it, I/O, torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """A rectangle of a stored tensor, taken as [rows, columns] with all dimensions but the last as rows.

    `transposed`: the rectangle is [in, out], the parameter [out, in]. row_step, col_step: of the stored tensor's rows
    and columns it takes every so many. changed: what the file has of each number x, see NameTable; else empty.
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
