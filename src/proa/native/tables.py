"""Reads the tables with which the native library describes itself (csrc/include/proa/tables.h). Never: what
the rows mean.
"""

from __future__ import annotations

import functools
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_void_p, sizeof
from typing import Any, NamedTuple, TypeVar, get_type_hints

from proa.native.library import Signatures, library

Row = TypeVar("Row", bound=tuple[Any, ...])

_FIELDS: dict[type, Any] = {str: c_char_p, int: c_int32, bool: c_int32}


class Limit(NamedTuple):
    """proa_limit of tables.h."""

    name: str
    value: int


_SIGNATURES: Signatures = dict.fromkeys(
    ("proa_get_formats", "proa_get_stored_types", "proa_get_limits"), (c_void_p, POINTER(c_int64), c_int64)
)


def read_table(function: str, row: type[Row]) -> tuple[Row, ...]:
    """The rows of a table. row: a NamedTuple with the fields of the C struct, in its order, of type str, int or bool.

    Raises NativeError if there is no library, ValueError if the library's rows have another size.
    """
    kinds: dict[str, type] = get_type_hints(row)
    fields = [(name, _FIELDS[kind]) for name, kind in kinds.items()]
    struct: Any = type(row.__name__, (Structure,), {"_fields_": fields})
    rows, count = POINTER(struct)(), c_int64()
    getattr(library().bind(_SIGNATURES), function)(byref(rows), byref(count), sizeof(struct))
    return tuple(_row(row, kinds, rows[i]) for i in range(count.value))


def _row(row: type[Row], kinds: dict[str, type], of: Any) -> Row:
    found = {name: getattr(of, name) for name in kinds}
    return row(*(v.decode() if kinds[name] is str else kinds[name](v) for name, v in found.items()))


@functools.cache
def limits() -> dict[str, int]:
    """Numbers of the native library that the rest of Proa must know, by name. Raises NativeError."""
    return dict(read_table("proa_get_limits", Limit))
