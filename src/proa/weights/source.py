"""The place of a parameter in a checkpoint. Never: finding it, I/O, torch."""

from __future__ import annotations

from dataclasses import dataclass


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
