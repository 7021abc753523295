"""Weights packed for the native kernels: choosing formats, owning the memory, packing the loader's rows.
Never: computing with them.

A stack keeps the checkpoint's format if all its matrices have one type and a packed format holds it exactly; else it is
bfloat16. Memory is allocated when the first row arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from proa.errors import NativeError
from proa.native.arena import Arena
from proa.native.fill import Fill, StoredRows, fill, touch
from proa.native.formats import PANEL_ROWS, Format, kept_form, layout
from proa.native.pool import Pool
from proa.native.weights import Matrix, Piece
from proa.ops.pieces import UNIT_PANELS
from proa.ops.staging import STORED

_ARENA_BYTES = 64 << 20  # allocated at once, so that small matrices share huge pages


class Memory:
    """The RAM of all packed weights: arenas per team of the pool. Each team touches its arenas first, so that pages lie
    on its node even if the system refuses to bind them. With `interleave`, pages are spread over those nodes instead.
    """

    def __init__(self, pool: Pool, nodes: Sequence[int | None], interleave: Sequence[int] = ()) -> None:
        self.pool = pool
        self.nodes, self._interleave = tuple(nodes), tuple(interleave)
        self.bytes_by_format: Counter[str] = Counter()
        self._arenas: list[list[Arena]] = [[] for _ in nodes]
        self._used = [0] * len(nodes)

    def take(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Allocate sizes_bytes[i] zeroed bytes on team i's node; returns addresses, aligned to 64 (0 for no bytes).

        Raises ResourceError; NativeError if pages cannot be interleaved.
        """
        firsts = [self._reserve(team, nbytes) if nbytes else 0 for team, nbytes in enumerate(sizes_bytes)]
        taken = [team for team, nbytes in enumerate(sizes_bytes) if nbytes]
        touch(self.pool, [(team, self._arenas[team][-1], firsts[team], sizes_bytes[team]) for team in taken])
        addresses = [0] * len(sizes_bytes)
        for team in taken:
            addresses[team] = self._arenas[team][-1].data + firsts[team]
        return addresses

    def _reserve(self, team: int, nbytes: int) -> int:
        """Reserve `nbytes` bytes in the team's last arena, adding one if needed; returns their offset."""
        arenas, nbytes = self._arenas[team], -(-nbytes // 64) * 64
        if not arenas or self._used[team] + nbytes > arenas[-1].nbytes:
            node = None if self._interleave else self.nodes[team]
            try:
                arenas.append(Arena(max(nbytes, _ARENA_BYTES), node, interleave=self._interleave))
            except NativeError as error:  # only interleaving raises: a failed bind is recorded in ArenaInfo
                raise NativeError(error.message, "Use --numa-memory bind.") from None
            self._used[team] = 0
        first, self._used[team] = self._used[team], self._used[team] + nbytes
        return first

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of the memory allocated so far, in whole pages: one per arena, so that none splits a
        matrix."""
        return [(arena.data, arena.info.touched_bytes) for arenas in self._arenas for arena in arenas]

    def pages(self) -> dict[str, int]:
        """Allocated bytes by kind of page."""
        kinds: Counter[str] = Counter()
        for arena in (a for arenas in self._arenas for a in arenas):
            kinds[arena.info.pages] += arena.info.touched_bytes
        return dict(kinds)

    def unbound(self) -> str:
        """Why some memory could not be bound to its node; "" if all is bound."""
        if self._interleave:
            return ""
        for node, arenas in zip(self.nodes, self._arenas, strict=True):
            for info in (arena.info for arena in arenas):
                if info.node != node:
                    return info.reason
        return ""


class Stack:
    """`count` packed matrices [rows, columns] of one format. interleaved: each holds two, gate and up, with alternating
    panels."""

    def __init__(
        self, memory: Memory, count: int, rows: int, columns: int, *, interleaved: bool = False,
        stored: set[str] | None = None,
    ) -> None:  # fmt: skip
        """stored: set of the checkpoint's types, shared with stacks that must get the same format."""
        self.rows, self.columns, self._count = rows, columns, count
        self._step = 2 if interleaved else 1
        self._memory = memory
        self._stored = set() if stored is None else stored
        self._pieces: list[Piece] = []
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        """The packed matrices, allocated at the first call; rows not written yet are zero."""
        if self._matrix is None:
            self._matrix = self._allocate()
        return self._matrix

    @property
    def panels(self) -> int:
        return -(-self.rows // PANEL_ROWS) * self._step

    def expect(self, stored: str) -> None:
        self._stored.add(stored)

    @property
    def format(self) -> Format:
        return kept_form(self._stored, self.columns)[0]

    def _allocate(self) -> Matrix:
        form, group = kept_form(self._stored, self.columns)
        of = layout(form, self.panels * PANEL_ROWS if self._step == 2 else self.rows, self.columns, group)
        nodes = len(self._memory.nodes)
        units = -(-of.panels // UNIT_PANELS)
        firsts = [units * n // nodes * UNIT_PANELS for n in range(nodes)] + [of.panels]
        strides = [(end - first) * of.panel_bytes for first, end in pairwise(firsts)]
        addresses = self._memory.take([stride * self._count for stride in strides])
        for first, address, stride in zip(firsts, addresses, strides, strict=False):
            self._pieces.append(Piece(first, address, stride, stride * self._count))
        self._memory.bytes_by_format[form.name.lower()] += of.matrix_bytes * self._count
        return Matrix(of, self._pieces, self._count)

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of one matrix, in the order of its panels."""
        self.matrix  # noqa: B018  allocates the memory
        return [
            Piece(piece.first_panel, piece.address + index * piece.stride, piece.stride, piece.stride)
            for piece in self._pieces
            if piece.stride
        ]

    def fills(self, index: int, part: int, first: int, count: int, rows: StoredRows) -> list[Fill]:
        """Jobs that fill `count` rows from `first` on of one matrix (part 1: up), each piece by its team."""
        of, found = self.matrix.layout, []
        end = first + count
        for team, (piece, following) in enumerate(zip(self._pieces, [*self._pieces[1:], None], strict=True)):
            end_panel = following.first_panel if following else of.panels
            low = max(first, piece.first_panel // self._step * PANEL_ROWS)
            high = min(end, end_panel // self._step * PANEL_ROWS)
            if low >= high:
                continue
            panel = low // PANEL_ROWS * self._step + part - piece.first_panel
            offset = index * piece.stride + panel * of.panel_bytes
            to = layout(of.format, high - low, of.columns, of.group if of.format is not Format.BF16 else 0)
            left = (index + 1) * piece.stride - offset
            found.append(Fill(rows.after(low - first), to, piece.address + offset, left, team, self._step))
        return found

    @property
    def pool(self) -> Pool:
        """The pool whose teams own the pieces."""
        return self._memory.pool


class RowSink:
    """The sink of one matrix of a stack. part: 0 gate or the whole matrix, 1 up.

    where: returns the stack and this sink's first row in it; called only after `expect` was called for all sinks.
    """

    def __init__(
        self, rows: int, columns: int, expect: Callable[[str], None], where: Callable[[], tuple[Stack, int]],
        *, index: int = 0, part: int = 0,
    ) -> None:  # fmt: skip
        self.shape = (rows, columns)
        self.row_unit = PANEL_ROWS
        self.expect = expect
        self._where, self._index, self._part = where, index, part

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> list[Fill]:
        stack, base = self._where()
        count = self.shape[0] - first if count is None else count
        return stack.fills(self._index, self._part, base + first, count, rows)

    def write(self, first: int, rows: Tensor) -> None:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stored = StoredRows(STORED[rows.dtype], rows.data_ptr(), rows.stride(0) * rows.itemsize)
        fill(self._where()[0].pool, self.fills(stored, first, len(rows)))
