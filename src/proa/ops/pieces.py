"""Tagged addresses of packed matrices for GPU kernels: the address of the panels, or, for a matrix in pieces on several
NUMA nodes, the address of a table of its pieces with the lowest bit set. Never: where pieces should lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from proa.native.formats import Layout
from proa.native.weights import Piece

TAG = 1  # never set in addresses of packed weights, which are aligned to cache lines
UNIT_PANELS = 2  # pieces begin at multiples of this, so that an aligned group of panels is never split


def row_of(pieces: Sequence[Piece], of: Layout) -> list[int]:
    """The int64 table of a matrix: number of pieces, then per piece its first panel and the address that panel 0 would
    have if the piece started there."""
    numbers = [len(pieces)]
    for piece in pieces:
        numbers += [piece.first_panel, piece.address - piece.first_panel * of.panel_bytes]
    return numbers


def pieces_at(address: int, of: Layout) -> list[Piece]:
    """Decode a tagged address into pieces; matrix and table must be in this process's RAM."""
    if not address & TAG:
        return [Piece(0, address, of.matrix_bytes, of.matrix_bytes)]
    row = address - TAG
    count = ctypes.c_int64.from_address(row).value
    numbers = (ctypes.c_int64 * (2 * count)).from_address(row + 8)
    firsts, starts = numbers[0::2], numbers[1::2]
    sizes = [(end - first) * of.panel_bytes for first, end in zip(firsts, [*firsts[1:], of.panels], strict=True)]
    return [
        Piece(first, start + first * of.panel_bytes, nbytes, nbytes)
        for first, start, nbytes in zip(firsts, starts, sizes, strict=True)
    ]
