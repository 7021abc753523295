"""Copies of experts to the ring: every byte of every matrix at its place, neighbours at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proa.hybrid.uploads import transfers_of
from proa.native.weights import Piece

COUNT = 12  # matrices in RAM


@given(
    st.lists(st.integers(0, COUNT - 1), unique=True, min_size=1).map(sorted),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_bytes_arrive_in_order(numbers: list[int], sizes: list[int]) -> None:
    """sizes: bytes of each memory node's piece of a matrix."""
    ram, pieces = bytearray(), list[Piece]()
    for node, size in enumerate(sizes):
        pieces.append(Piece(0, len(ram), size, size))
        for number in range(COUNT):
            ram += bytes(16 * number + 4 * node for _ in range(size))
    ring = bytearray(len(numbers) * sum(sizes))
    for copy in (found := transfers_of(numbers, pieces, 0)):
        ring[copy.to : copy.to + copy.nbytes] = ram[copy.source : copy.source + copy.nbytes]
    wanted = b"".join(bytes([16 * n + 4 * node]) * size for n in numbers for node, size in enumerate(sizes))
    assert bytes(ring) == wanted
    if len(sizes) == 1:
        runs = sum(number - 1 not in numbers for number in numbers)
        assert len(found) == runs
