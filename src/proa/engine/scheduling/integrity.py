"""Checks that pages, locks, slots and requests are accounted for exactly. For tests and soaks: takes milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.radix import PrefixCache
from proa.engine.scheduling.policy import Limits, Lineup
from proa.engine.scheduling.request import NO_SLOT, Request, State


def check_pages(
    allocator: PageAllocator, cache: PrefixCache | None, running: Iterable[Request], copied: Iterable[int]
) -> None:
    """Raise IntegrityError unless every page's reference count equals its number of holders. copied: references of
    copies to and from other tiers."""
    allocator.check()
    holders: Counter[int] = Counter(copied)
    for request in running:
        holders.update(request.pages)
    if cache:
        cache.check()
        holders.update(cache.pages())
    for page in range(allocator.num_pages):
        if (count := allocator.references(page)) != holders[page]:
            raise IntegrityError(f"page {page} has {count} references but {holders[page]} known holders")


def check_slots(free: Collection[int], running: Iterable[Request], limits: Limits) -> None:
    """Raise IntegrityError unless every state slot is free or held by exactly one request."""
    held = [*free, *(request.state_slot for request in running)]
    if sorted(held) != list(range(limits.num_slots)):
        raise IntegrityError(f"state slots free or held are {sorted(held)}, expected 0 to {limits.num_slots - 1} once")


def check_request(request: Request, limits: Limits, cache: PrefixCache | None) -> None:
    """Raise IntegrityError unless the request's pages, slot and prefix-tree node fit its state."""
    if request.state is State.WAITING:
        if request.pages or request.num_computed or request.node or request.state_slot != NO_SLOT:
            raise IntegrityError(f"{request!r} waits but holds pages {request.pages}, a state slot or a tree node")
        return
    if request.num_computed > len(request.pages) * limits.page_tokens:
        raise IntegrityError(f"{request!r} has {len(request.pages)} pages, too few for its computed tokens")
    if request.num_computed >= len(request.tokens):
        raise IntegrityError(f"{request!r} runs but has no token left to compute")
    if cache and request.node:
        path = cache.path(request.node)
        if path != request.pages[: len(path)] or request.num_shared > request.num_computed:
            raise IntegrityError(f"{request!r} has pages {request.pages}; its path in the prefix cache is {path}")


def check_lineups(requests: Mapping[str, Request], waiting: Lineup, running: Lineup) -> None:
    if len(requests) != len(waiting) + len(running):
        raise IntegrityError("a request is neither waiting nor running")
