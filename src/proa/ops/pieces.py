"""How a device's kernels find packed matrices: by the address of their bytes, or, where they lie in pieces on several
memory nodes, by an address with its lowest bit set, of a row of numbers. Never: where pieces should lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from proa.native.formats import Layout
from proa.native.weights import Piece

TAG = 1  # packed weights begin on whole lines, so no address of theirs has it
UNIT_PANELS = 2  # pieces begin at a multiple: so many panels from a multiple on are in one piece


def row_of(pieces: Sequence[Piece], of: Layout) -> list[int]:
    """int64: how many pieces; of each its first panel, and where panel 0 would lie if those before it lay there too."""
    numbers = [len(pieces)]
    for piece in pieces:
        numbers += [piece.first_panel, piece.address - piece.first_panel * of.panel_bytes]
    return numbers


def pieces_at(address: int, of: Layout) -> list[Piece]:
    """Of a matrix in this process' own RAM, as is its row of numbers if it has one."""
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
