"""Pages between the prefix tree and the tiers behind it: which runs are stored, and which are restored before a request
is admitted. Never: tensors, files, threads.

Restoring: a request that could be admitted waits instead, without pages or a slot, while the runs that the tree lacks
are read into pages that belong to the restore. These then enter the tree, and the request is admitted with a prefix hit
like any other. So preemption and abortion need no other rules, and a request whose runs turn out to be damaged computes
its tokens. A request restores once for each admission, since restored pages may be evicted before it is admitted.

Storing: runs that have become full in the tree are stored one after another, beside the steps. Until its copy begins, a
run is not protected from eviction; then its path is locked, as by a request, until it is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from proa.cache.keys import RunKeys
from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.radix import PrefixCache, PrefixMatch, PrefixNode
from proa.engine.scheduling.phases import Phases
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.tiers import Restore, Store, Tiers

STORED_AT_ONCE = 2  # runs whose pages are locked for copying: one is copied while the next waits
MOST_BACKLOG = 4096  # runs that wait to be stored; the oldest are dropped


class Behind(Protocol):
    """The interface of the tiers behind the prefix tree to the scheduler."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way or due, so that `collect` has something to do soon."""

    def collect(self) -> None:
        """Take the results of finished copies and begin due ones. Called before each step, and now and then while no
        request runs."""

    def holds(self, request: Request) -> bool:
        """Whether a waiting request may not be admitted yet, because pages for it are being restored."""

    def begin(self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool) -> bool:
        """Begin to restore pages for a request that could be admitted now with `match` and use up to `most_tokens`
        tokens of a prefix. Returns whether the request must wait: not if no more pages are stored, or computing them is
        predicted to be quicker. calm: no step is in flight, apart from one beside. A step in flight may still use pages
        that were released when the step before it was committed. Steps are computed in their order, so later ones may
        use such pages, but a restore is not ordered with them and begins only without such steps."""

    def shared(self, request: Request) -> None:
        """Store the runs that the request's pages in the tree have completed since the last call."""

    def held_pages(self) -> Iterator[int]:
        """The pages that copies under way hold, one entry for each reference."""


class NothingBehind:
    """The prefix tree has no tiers behind it."""

    busy = False

    def collect(self) -> None:
        pass

    def holds(self, request: Request) -> bool:
        return False

    def begin(self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool) -> bool:
        return False

    def shared(self, request: Request) -> None:
        pass

    def held_pages(self) -> Iterator[int]:
        return iter(())


@dataclass(eq=False)
class _Restoring:
    """A restore under way. node: the locked end of the prefix that the tree had; prefix: its pages, each with a
    reference; page_keys: one for each page of the job. waiting: ids of the requests that wait for it."""

    job: Restore
    node: PrefixNode
    prefix: Sequence[int]
    page_keys: Sequence[Hashable]
    waiting: set[str]


@dataclass(eq=False)
class _Storing:
    """A store under way. node: the locked end of the run; path: pages from the root to it, each with a reference."""

    job: Store
    node: PrefixNode
    path: Sequence[int]


class BehindTree:
    def __init__(self, tiers: Tiers, cache: PrefixCache, allocator: PageAllocator, phases: Phases) -> None:
        """phases: which lengths of a cached prefix can be used."""
        self._tiers, self._cache, self._allocator, self._phases = tiers, cache, allocator, phases
        self._keys = RunKeys(tiers.root, tiers.run_pages * cache.page_tokens)
        self._restoring: list[_Restoring] = []
        self._storing: list[_Storing] = []
        self._backlog: dict[bytes, PrefixNode] = {}  # runs to be stored: key -> node at the end, oldest first

    @property
    def busy(self) -> bool:
        return bool(self._restoring or self._storing or self._backlog)

    def collect(self) -> None:
        for one in [one for one in self._restoring if one.job.done]:
            self._restoring.remove(one)
            self._enter(one)
        for stored in [one for one in self._storing if one.job.done]:
            self._storing.remove(stored)
            self._allocator.release(stored.path)
            self._cache.unlock(stored.node)
        while self._backlog and len(self._storing) < STORED_AT_ONCE:
            key = next(iter(self._backlog))
            self._store(key, self._backlog.pop(key))

    def holds(self, request: Request) -> bool:
        return any(request.id in one.waiting for one in self._restoring)

    def begin(self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool) -> bool:
        run_tokens, matched = self._keys.run_tokens, len(match.pages) * self._cache.page_tokens
        first = matched // run_tokens
        if request.restored or most_tokens // run_tokens <= first:
            return False
        keys = self._run_keys(request, most_tokens // run_tokens)
        same = next((one for one in self._restoring if keys[first] in one.job.keys), None)
        if same is not None:
            same.waiting.add(request.id)
            return True
        last = next((run for run in range(first, len(keys)) if not self._tiers.has(keys[run])), len(keys))
        end = self._phases.whole_tokens(last * run_tokens)
        if end <= matched:
            return False
        wanted = keys[first : -(-end // run_tokens)]
        if not self._tiers.worthwhile(wanted, end - matched):
            return False
        if calm:
            self._begin(request, match, wanted, end // self._cache.page_tokens)
        return True

    def _begin(self, request: Request, match: PrefixMatch, keys: Sequence[bytes], end_page: int) -> None:
        num_matched = len(match.pages)
        self._cache.lock(match.node)
        self._allocator.share(match.pages)
        need = end_page - num_matched
        self._cache.evict(max(0, need - self._allocator.num_free))
        pages = self._allocator.alloc(need)
        if pages is None:
            raise IntegrityError(f"{need} pages to restore were counted as available, but are not")
        job = Restore(keys, pages, num_matched % self._tiers.run_pages)
        page_keys = request.keys[num_matched:end_page]
        self._restoring.append(_Restoring(job, match.node, match.pages, page_keys, {request.id}))
        request.restored = True
        self._tiers.restore(job)

    def _enter(self, one: _Restoring) -> None:
        """Enter the pages that were restored into the tree, which alone holds them then."""
        good = one.job.num_pages
        node, held = self._cache.insert(one.node, one.page_keys[:good], one.job.pages[:good])
        for pages in (held, one.job.pages[good:], one.prefix):
            self._allocator.release(pages)
        self._cache.unlock(node)

    def shared(self, request: Request) -> None:
        size, node = self._tiers.run_pages, request.node
        if node is None or node.depth // size <= request.num_stored:
            return
        num_runs, first = node.depth // size, request.num_stored
        keys, request.num_stored = self._run_keys(request, num_runs), num_runs
        ends: list[PrefixNode] = []
        while node is not None and node.depth > first * size:
            if node.depth % size == 0:
                ends.append(node)
            node = node.parent
        for key in reversed(keys[first:]):  # the first one last: later ones cannot be restored without it
            self._tiers.touch(key)
        for key, end in zip(keys[first:], reversed(ends), strict=True):
            if self._tiers.lacks(key):
                self._backlog[key] = end
        while len(self._backlog) > MOST_BACKLOG:
            del self._backlog[next(iter(self._backlog))]

    def _store(self, key: bytes, node: PrefixNode) -> None:
        if node.parent is None or not self._tiers.lacks(key):  # without a parent: it was evicted
            return
        path = self._cache.path(node)
        self._cache.lock(node)
        self._allocator.share(path)
        job = Store(key, path[-self._tiers.run_pages :])
        self._storing.append(_Storing(job, node, path))
        self._tiers.store(job)

    def held_pages(self) -> Iterator[int]:
        for one in self._restoring:
            yield from (*one.prefix, *one.job.pages)
        for stored in self._storing:
            yield from stored.path

    def _run_keys(self, request: Request, num_runs: int) -> list[bytes]:
        """Keys of the request's first runs, computed once and kept."""
        self._keys.extend(request.run_keys, request.tokens, request.salt, num_runs)
        return request.run_keys[:num_runs]


def behind(tiers: Tiers | None, cache: PrefixCache | None, allocator: PageAllocator, phases: Phases) -> Behind:
    """Tiers behind a prefix tree; nothing if either is missing."""
    return NothingBehind() if tiers is None or cache is None else BehindTree(tiers, cache, allocator, phases)
