"""Pages and copies of states between the prefix tree and the tiers behind it: which are stored, and which are restored
before a request is admitted. Never: tensors, files, threads.

Restoring: a request that could be admitted waits instead, without pages or a slot, while the runs that the tree lacks
are read into pages that belong to the restore. These then enter the tree, and the request is admitted with a prefix hit
like any other. So preemption and abortion need no other rules, and a request whose runs turn out to be damaged computes
its tokens. A request restores once for each admission, since restored pages may be evicted before it is admitted.

With recurrent states a prefix is restored up to the deepest stored copy of states on the request's path, because no
request could continue from pages behind it. Often the tree has the pages still, and only the states are restored. If
that fails, a shorter prefix is tried. The copy goes into a slot for copies, and belongs to its node of the tree then.

Storing: runs that have become full in the tree, and copies of states, are stored one after another, beside the steps.
Until its copy begins, neither is protected from eviction; then the path is locked, as by a request, until it is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from proa.cache.keys import RunKeys, state_key
from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.radix import PrefixCache, PrefixMatch, PrefixNode
from proa.engine.scheduling.phases import Phases
from proa.engine.scheduling.request import NO_SLOT, Request
from proa.engine.scheduling.stored_states import PrefixEnd, StoredStates
from proa.engine.scheduling.tiers import Entry, Restore, Run, StatePart, Store, Tiers

STORED_AT_ONCE = 2  # runs or copies of states that are locked for copying: one is copied while the next waits
MOST_BACKLOG = 4096  # runs and copies of states that wait to be stored; the oldest are dropped


class Behind(Protocol):
    """The interface of the tiers behind the prefix tree to the scheduler."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way or due, so that `collect` has something to do soon."""

    def collect(self) -> None:
        """Take the results of finished copies, begin due ones and let the tiers keep up. Called before each step, and
        regularly while no request runs."""

    def holds(self, request: Request) -> bool:
        """Whether a waiting request may not be admitted yet, because pages for it are being restored."""

    def begin(
        self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool, reading: Set[int]
    ) -> bool:  # fmt: skip
        """Begin to restore pages for a request that could be admitted now with `match` and use up to `most_tokens`
        tokens of a prefix. Returns whether the request must wait: not if no longer prefix is stored, or computing it is
        predicted to be quicker. calm: no step is in flight, apart from one beside. A step in flight may still use pages
        that were released when the step before it was committed. Steps are computed in their order, so later ones may
        use such pages, but a restore is not ordered with them and begins only without such steps. reading: slots of
        states that steps in flight, or being planned, copy from."""

    def shared(self, request: Request) -> None:
        """Store the runs that the request's pages in the tree have completed since the last call."""

    def copied(self, request: Request, node: PrefixNode) -> None:
        """Have the copy of states at `node`, on the request's path, stored, unless one is stored or due less than a run
        before it."""

    def resumed(self, request: Request, node: PrefixNode) -> None:
        """Note that a request has continued from the copy of states at `node`."""

    def held_pages(self) -> Iterator[int]:
        """The pages that copies under way hold, one entry for each reference."""

    def held_slots(self) -> Iterator[int]:
        """The slots of states that are being restored."""


class NothingBehind:
    """The prefix tree has no tiers behind it."""

    busy = False

    def collect(self) -> None:
        pass

    def holds(self, request: Request) -> bool:
        return False

    def begin(
        self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool, reading: Set[int]
    ) -> bool:  # fmt: skip
        return False

    def shared(self, request: Request) -> None:
        pass

    def copied(self, request: Request, node: PrefixNode) -> None:
        pass

    def resumed(self, request: Request, node: PrefixNode) -> None:
        pass

    def held_pages(self) -> Iterator[int]:
        return iter(())

    def held_slots(self) -> Iterator[int]:
        return iter(())


@dataclass(frozen=True)
class _Found:
    """A prefix that can be restored, of num_tokens tokens. node: the end of what the tree has of it. runs, states: keys
    of the entries that are missing; the first run is the one that `node` ends in, or the next one."""

    num_tokens: int
    node: PrefixNode
    runs: Sequence[bytes]
    states: Sequence[bytes] = ()

    @property
    def keys(self) -> list[bytes]:
        return [*self.runs, *self.states]


@dataclass(eq=False)
class _Restoring:
    """A restore under way. node: the locked end of the prefix that the tree had; prefix: its pages, each with a
    reference; pages, page_keys: those that are restored; slot: of the states, reserved; NO_SLOT if there are none.
    waiting: ids of the requests that wait for it."""

    job: Restore
    request: Request  # for which it was begun
    num_tokens: int
    node: PrefixNode
    prefix: Sequence[int]
    pages: Sequence[int]
    page_keys: Sequence[Hashable]
    slot: int
    waiting: set[str]


@dataclass(frozen=True)
class _Due:
    """A run, which ends at `node`, or the copy of states there, that waits to be stored."""

    node: PrefixNode
    states: PrefixEnd | None = None


@dataclass(eq=False)
class _Storing:
    """A store under way. node: the locked end of what is stored; path: pages from the root to it, each with a
    reference. has_states: the copy of states at `node` is locked too."""

    job: Store
    key: bytes
    node: PrefixNode
    path: Sequence[int]
    has_states: bool


class BehindTree:
    def __init__(self, tiers: Tiers, cache: PrefixCache, allocator: PageAllocator, phases: Phases) -> None:
        """phases: which lengths of a cached prefix can be used."""
        self._tiers, self._cache, self._allocator, self._phases = tiers, cache, allocator, phases
        self._size = cache.page_tokens
        self._keys = RunKeys(tiers.root, tiers.run_pages * self._size, self._size, phases.cell_tokens)
        self._copies, self._states = cache.copies, StoredStates(tiers, self._keys)
        self._restoring: list[_Restoring] = []
        self._storing: list[_Storing] = []
        self._backlog: dict[bytes, _Due] = {}  # by the key of the run, or of the first part of the states; oldest first

    @property
    def busy(self) -> bool:
        return bool(self._restoring or self._storing or self._backlog)

    def collect(self) -> None:
        for one in [one for one in self._restoring if one.job.done]:
            self._restoring.remove(one)
            self._enter(one)
        for stored in [one for one in self._storing if one.job.done]:
            self._storing.remove(stored)
            if self._copies is not None and stored.has_states:
                self._copies.unlock(stored.node)
            self._allocator.release(stored.path)
            self._cache.unlock(stored.node)
        while self._backlog and len(self._storing) < STORED_AT_ONCE:
            key = next(iter(self._backlog))
            self._store(key, self._backlog.pop(key))
        self._tiers.keep_up()

    def holds(self, request: Request) -> bool:
        return any(request.id in one.waiting for one in self._restoring)

    def begin(
        self, request: Request, match: PrefixMatch, most_tokens: int, *, calm: bool, reading: Set[int]
    ) -> bool:  # fmt: skip
        matched = len(match.pages) * self._size
        most_tokens = min(most_tokens, request.restorable)
        found = self._found(request, match, most_tokens) if most_tokens > matched else None
        if found is None:
            return False
        keys = found.keys
        same = next((one for one in self._restoring if any(e.key == keys[0] for e in one.job.entries)), None)
        if same is not None:
            same.waiting.add(request.id)
            return True
        if not self._tiers.worthwhile(keys, found.num_tokens - matched):
            return False
        return self._begin(request, found, reading) if calm else True

    def _found(self, request: Request, match: PrefixMatch, most_tokens: int) -> _Found | None:
        """The longest stored prefix of up to most_tokens tokens, if it is longer than the one that matches."""
        matched, known = len(match.pages) * self._size, match.known.depth * self._size
        run_tokens = self._keys.run_tokens
        first = known // run_tokens
        runs = self._run_keys(request, most_tokens // run_tokens)
        last = next((run for run in range(first, len(runs)) if not self._tiers.has(runs[run])), len(runs))
        if self._copies is None:
            end = self._phases.whole_tokens(last * run_tokens)
            return _Found(end, match.known, runs[first : -(-end // run_tokens)]) if end > known else None
        reach = min(most_tokens, (last + 1) * run_tokens - 1)  # the pages behind the last run are stored with states
        for copy in self._states.ends(request, matched, reach):
            end, missing = copy.num_tokens, runs[first : copy.num_tokens // run_tokens]
            if end > known and end % run_tokens:
                missing.append(copy.key)
            if self._phases.whole_tokens(end) == end and self._states.has(copy) and all(map(self._tiers.has, missing)):
                return _Found(end, _cut(match.known, end // self._size), missing, self._states.keys(copy))
        return None

    def _begin(self, request: Request, found: _Found, reading: Set[int]) -> bool:
        """Returns False, and changes nothing, if there is no slot for the states."""
        slot = NO_SLOT
        if self._copies is not None:
            taken = self._copies.take(reading)
            if taken is None:
                return False
            slot = taken
        node, prefix = found.node, self._cache.path(found.node)
        self._cache.lock(node)
        self._allocator.share(prefix)
        end = found.num_tokens // self._size
        need = end - node.depth
        self._cache.evict(max(0, need - self._allocator.num_free))
        pages = self._allocator.alloc(need)
        if pages is None:
            raise IntegrityError(f"{need} pages to restore were counted as available, but are not")
        job = Restore((*self._run_entries(found, pages), *_state_entries(found.states, slot)))
        page_keys = request.keys[node.depth : end]
        self._restoring.append(
            _Restoring(job, request, found.num_tokens, node, prefix, pages, page_keys, slot, {request.id})
        )
        request.restorable = 0
        self._tiers.restore(job)
        return True

    def _run_entries(self, found: _Found, pages: Sequence[int]) -> list[Entry]:
        """Divide the pages, which follow `found.node`, among the runs."""
        size, entries, at = self._tiers.run_pages, list[Entry](), 0
        skipped = found.node.depth % size
        for key in found.runs:
            count = min(size - skipped, len(pages) - at)
            entries.append(Run(key, pages[at : at + count], skipped))
            at, skipped = at + count, 0
        return entries

    def _enter(self, one: _Restoring) -> None:
        """Enter the pages that were restored into the tree, which alone holds them then, and the copy of states."""
        restored = one.job.entries[: one.job.num_restored]
        good = sum(len(entry.pages) for entry in restored if isinstance(entry, Run))
        node, held = self._cache.insert(one.node, one.page_keys[:good], one.pages[:good])
        for pages in (held, one.pages[good:], one.prefix):
            self._allocator.release(pages)
        if self._copies is not None and len(restored) == len(one.job.entries):
            self._copies.keep(node, one.slot)
        elif self._copies is not None:
            self._copies.give_back(one.slot)
            one.request.restorable = one.num_tokens - 1
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
                self._add(key, _Due(end))

    def copied(self, request: Request, node: PrefixNode) -> None:
        num_tokens, run_tokens = node.depth * self._size, self._keys.run_tokens
        if self._copies is None or num_tokens < run_tokens:
            return
        copy, *before = self._states.ends(request, num_tokens - run_tokens, num_tokens)
        if any(self._states.has(end) or self._is_due(state_key(end.key, 0)) for end in before):
            return
        keys = self._states.keys(copy)
        if not self._is_due(keys[0]) and any(map(self._tiers.lacks, keys)):
            self._add(keys[0], _Due(node, copy))

    def resumed(self, request: Request, node: PrefixNode) -> None:
        copy = self._states.at(request, node.depth * self._size)
        for key in (copy.key, *self._states.keys(copy)):
            self._tiers.touch(key)

    def _is_due(self, key: bytes) -> bool:
        return key in self._backlog or any(one.key == key for one in self._storing)

    def _add(self, key: bytes, due: _Due) -> None:
        self._backlog[key] = due
        while len(self._backlog) > MOST_BACKLOG:
            del self._backlog[next(iter(self._backlog))]

    def _store(self, key: bytes, due: _Due) -> None:
        node = due.node
        if node.parent is None:  # it was evicted
            return
        path = self._cache.path(node)
        entries = self._entries(key, due, path)
        if not any(self._tiers.lacks(entry.key) for entry in entries):
            return
        if self._copies is not None and due.states is not None:
            self._copies.lock(node)
        self._cache.lock(node)
        self._allocator.share(path)
        job = Store(entries)
        self._storing.append(_Storing(job, key, node, path, due.states is not None))
        self._tiers.store(job)

    def _entries(self, key: bytes, due: _Due, path: Sequence[int]) -> list[Entry]:
        """The entries to store; none if the copy of states was evicted."""
        size = self._tiers.run_pages
        if due.states is None:
            return [Run(key, path[-size:])]
        slot = None if self._copies is None else self._copies.slot(due.node)
        if slot is None:
            return []
        behind = len(path) % size
        tail: list[Entry] = [Run(due.states.key, path[-behind:])] if behind else []
        return [*tail, *_state_entries(self._states.keys(due.states), slot)]

    def held_pages(self) -> Iterator[int]:
        for one in self._restoring:
            yield from (*one.prefix, *one.pages)
        for stored in self._storing:
            yield from stored.path

    def held_slots(self) -> Iterator[int]:
        return (one.slot for one in self._restoring if one.slot != NO_SLOT)

    def _run_keys(self, request: Request, num_runs: int) -> list[bytes]:
        """Keys of the request's first runs, computed once and kept."""
        self._keys.extend(request.run_keys, request.tokens, request.salt, num_runs)
        return request.run_keys[:num_runs]


def _state_entries(keys: Sequence[bytes], slot: int) -> list[Entry]:
    return [StatePart(key, slot, part) for part, key in enumerate(keys)]


def _cut(node: PrefixNode, depth: int) -> PrefixNode:
    """The node on the path to `node` that is at most `depth` pages deep."""
    while node.parent is not None and node.depth > depth:
        node = node.parent
    return node


def behind(tiers: Tiers | None, cache: PrefixCache | None, allocator: PageAllocator, phases: Phases) -> Behind:
    """Tiers behind a prefix tree; nothing if either is missing."""
    return NothingBehind() if tiers is None or cache is None else BehindTree(tiers, cache, allocator, phases)
