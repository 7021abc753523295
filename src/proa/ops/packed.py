"""Weights packed for the native kernels: taking rows from the loader, choosing formats, owning the memory.
Never: computing with them.

A stack's format is the checkpoint's own where its blocks can be kept exactly and all of the stack have the same type;
else it is bfloat16. Memory is taken when the first row comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from proa.errors import NativeError
from proa.native.arena import Arena
from proa.native.formats import KEPT, Format, Source, kept_form, layout, pack, pack_gguf
from proa.native.weights import Matrix, Piece

PANEL_ROWS = 16
_ARENA_BYTES = 64 << 20  # taken at once: many small matrices share huge pages


class Memory:
    """RAM of all packed weights, a run of arenas for each node, or dealt out over the nodes `interleave`."""

    def __init__(self, nodes: Sequence[int | None], interleave: Sequence[int] = ()) -> None:
        self.nodes, self._interleave = tuple(nodes), tuple(interleave)
        self.bytes_by_format: Counter[str] = Counter()
        self._arenas: list[list[Arena]] = [[] for _ in nodes]
        self._used = [0] * len(nodes)

    def take(self, piece: int, nbytes: int) -> int:
        """The address of `nbytes` zeroed bytes on the piece's node, aligned to 64.

        Raises ResourceError, and NativeError where pages cannot be dealt out.
        """
        arenas, nbytes = self._arenas[piece], -(-nbytes // 64) * 64
        if not arenas or self._used[piece] + nbytes > arenas[-1].nbytes:
            node = None if self._interleave else self.nodes[piece]
            try:
                arenas.append(Arena(max(nbytes, _ARENA_BYTES), node, interleave=self._interleave))
            except NativeError as error:  # a node that memory cannot be bound to is only noted
                raise NativeError(error.message, "Use --numa-memory bind.") from None
            self._used[piece] = 0
        at, self._used[piece] = self._used[piece], self._used[piece] + nbytes
        arenas[-1].touch(at, nbytes)
        return arenas[-1].data + at

    def pages(self) -> dict[str, int]:
        """Bytes by the kind of page they lie on."""
        kinds: Counter[str] = Counter()
        for arena in (a for arenas in self._arenas for a in arenas):
            kinds[arena.info.pages] += arena.info.touched_bytes
        return dict(kinds)

    def unbound(self) -> str:
        """Why some memory does not lie on the node it should; empty if all does."""
        if self._interleave:
            return ""
        for node, arenas in zip(self.nodes, self._arenas, strict=True):
            for info in (arena.info for arena in arenas):
                if info.node != node:
                    return info.reason
        return ""


class Stack:
    """`count` matrices [rows, columns] of one format. With `interleaved`, each is two (gate, up), panel by panel."""

    def __init__(self, memory: Memory, count: int, rows: int, columns: int, *, interleaved: bool = False) -> None:
        self.rows, self.columns, self._count = rows, columns, count
        self._step = 2 if interleaved else 1
        self._memory = memory
        self._stored: set[str] = set()
        self._pieces: list[Piece] = []
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        """The packed matrices; rows that nobody wrote are zeros."""
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
        units = of.panels // self._step
        firsts = [units * n // nodes * self._step for n in range(nodes)] + [of.panels]
        for n, (first, end) in enumerate(pairwise(firsts)):
            stride = (end - first) * of.panel_bytes
            address = self._memory.take(n, stride * self._count) if stride else 0
            self._pieces.append(Piece(first, address, stride, stride * self._count))
        self._memory.bytes_by_format[form.name.lower()] += of.matrix_bytes * self._count
        return Matrix(of, self._pieces, self._count)

    @property
    def step(self) -> int:
        """From one panel of a matrix's part to its next."""
        return self._step

    def places(self, index: int, part: int, first: int, rows: int) -> list[tuple[int, int, int]]:
        """(address, bytes left there, rows) of each piece's share of `rows` rows from `first` on."""
        of, found = self.matrix.layout, []
        end = first + rows
        for piece, following in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            end_panel = following.first_panel if following else of.panels
            low = max(first, piece.first_panel // self._step * PANEL_ROWS)
            high = min(end, end_panel // self._step * PANEL_ROWS)
            if low >= high:
                continue
            panel = low // PANEL_ROWS * self._step + part - piece.first_panel
            offset = index * piece.stride + panel * of.panel_bytes
            found.append((piece.address + offset, (index + 1) * piece.stride - offset, high - low))
        return found


class RowSink:
    """Rows of one matrix of a stack, as the loader sees them. `part` 1: up, beside gate.

    `where` tells the stack and this sink's first row in it; it is asked once all sinks know what they will get.
    """

    def __init__(
        self, rows: int, columns: int, expect: Callable[[str], None], where: Callable[[], tuple[Stack, int]],
        *, index: int = 0, part: int = 0,
    ) -> None:  # fmt: skip
        self.shape = (rows, columns)
        self.row_unit = PANEL_ROWS
        self.expect = expect
        self._where, self._index, self._part = where, index, part

    def takes(self, stored: str) -> bool:
        return stored in KEPT and self._where()[0].format is KEPT[stored].format

    def write(self, first: int, rows: Tensor) -> None:
        narrow = rows.to(torch.bfloat16).contiguous()
        stack, base = self._where()
        of, done = stack.matrix.layout, 0
        for address, nbytes, count in stack.places(self._index, self._part, base + first, len(rows)):
            source = Source(codes=narrow[done:].data_ptr(), code_stride=narrow.stride(0) * 2, scale_rows=1)
            pack(layout(of.format, count, of.columns, of.group), source, count, stack.step, address, nbytes)
            done += count

    def write_stored(self, stored: str, first: int, raw: Tensor) -> None:
        stack, base = self._where()
        done = 0
        for address, nbytes, count in stack.places(self._index, self._part, base + first, len(raw)):
            pack_gguf(
                KEPT[stored].type,
                count,
                stack.columns,
                raw[done:].data_ptr(),
                raw.stride(0),
                stack.step,
                address,
                nbytes,
            )
            done += count
