"""Lots: runs of consecutive KV pages that hold whole experts while no sequence needs them. Belongs here: where lots and
their rooms lie, and which may be lent or must come back. Never: experts, requests, clocks.

A page is a row of each tensor of the caches, so a run of pages is a piece of memory in each of them. A lot is so long
that at least one such piece holds an expert of the largest size; the pieces are cut into rooms of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.ops.caches import Caches
from proa.ops.sizes import EXPERT_ALIGNMENT_BYTES, aligned


@dataclass(frozen=True)
class Lots:
    """count lots of num_pages pages each, numbered from the highest pages down. Page 0 is in none: kernels read it in
    place of pages that do not exist. starts: for each tensor, where rooms begin, in bytes behind the first aligned
    byte of a piece."""

    num_pages: int
    count: int
    starts: Sequence[Sequence[int]]
    room_bytes: int
    pool_pages: int

    @property
    def rooms_each(self) -> int:
        return sum(map(len, self.starts))

    def pages(self, lot: int) -> range:
        end = self.pool_pages - lot * self.num_pages
        return range(end - self.num_pages, end)

    def rooms(self, lot: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rooms of a lot, uint8 [room_bytes]. tensors: [pages, ...] each, as in `lots_of`."""
        found, pages = list[Tensor](), self.pages(lot)
        for tensor, starts in zip(tensors, self.starts, strict=True):
            piece = tensor[pages.start : pages.stop].view(torch.uint8).view(-1)
            first = -pages.start * tensor[0].nbytes % EXPERT_ALIGNMENT_BYTES
            found += [piece[first + start : first + start + self.room_bytes] for start in starts]
        return found


def page_tensors(caches: Caches) -> list[Tensor]:
    """The tensors that have a row for each page, [pages, ...]."""
    return [tensor for layer in caches for cache in layer for tensor in cache.page_tensors]


def lots_of(page_bytes: Sequence[int], pool_pages: int, expert_bytes: int) -> Lots:
    """Divide a pool. page_bytes: of a page in each tensor; expert_bytes: of the largest expert, with its alignment.
    Of the lengths at which an expert just fits into the piece of some tensor, the one that wastes least is taken."""
    room = aligned(expert_bytes)
    skipped = [0 if each % EXPERT_ALIGNMENT_BYTES == 0 else EXPERT_ALIGNMENT_BYTES for each in page_bytes]  # at most
    lengths = sorted({-(-(room + skip) // each) for each, skip in zip(page_bytes, skipped, strict=True)})
    if not lengths:
        return Lots(1, 0, [[] for _ in page_bytes], room, pool_pages)

    def counts(length: int) -> list[int]:
        return [max(0, length * each - skip) // room for each, skip in zip(page_bytes, skipped, strict=True)]

    length = max(lengths, key=lambda length: sum(counts(length)) / length)
    starts = [[i * room for i in range(count)] for count in counts(length)]
    return Lots(length, max(0, pool_pages - 1) // length, starts, room, pool_pages)


@dataclass(frozen=True)
class Demand:
    """Numbers of pages of a pool with lots. free: neither in use nor lent; evictable: held only by the prefix cache;
    coming: in lots that are being taken back; reserve: kept available for growing sequences, so that no step waits."""

    free: int
    evictable: int
    coming: int
    reserve: int


def lots_due(short_pages: int, demand: Demand, lot_pages: int) -> int:
    """How many lots must be taken back for `short_pages` more pages than are available, or else for the reserve."""
    wanted = max(short_pages, demand.reserve - demand.free - demand.evictable)
    return max(0, -(-(wanted - demand.coming) // lot_pages))


def lots_to_lend(demand: Demand, headroom_pages: int, lot_pages: int) -> int:
    """How many lots may be lent. headroom_pages: pages that stay free besides the reserve, so that the next short
    request needs no lot back."""
    if demand.coming:
        return 0
    return max(0, (demand.free - demand.reserve - headroom_pages) // lot_pages)
