"""Tiers whose copies finish late, in any state of health, over the pages and states of a FakeEngine. Never: tests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from proa.engine.scheduling.tiers import Entry, Restore, Run, StatePart, Store

Slot = tuple[int, int, str] | None
Pool = dict[tuple[int, int], tuple[int, int, str]]  # (page, slot) -> anything
STATE_PARTS = 2


class SimTiers:
    """root, run_pages, state_parts: see Tiers. Copies finish in the order of their calls, when `advance` says."""

    root = b"sim"

    def __init__(
        self, random: Random, run_pages: int, page_tokens: int, *, ill: float = 0.0, refuse: float = 0.0
    ) -> None:
        """ill: probability that an entry has vanished or is damaged when it is read. refuse: that restoring is
        predicted to be slower, or writing is paused."""
        self.run_pages, self.state_parts, self._random, self._page_tokens = run_pages, STATE_PARTS, random, page_tokens
        self._ill, self._refuse = ill, refuse
        self.pool: Pool = {}
        self.states: dict[int, int] = {}
        self.stored: dict[bytes, list[list[Slot]] | int] = {}  # by key: pages, or a state
        self.touched: list[bytes] = []
        self._stores: list[tuple[Store, object]] = []
        self._restores: list[Restore] = []
        self.restored_pages = self.restored_states = 0

    def has(self, key: bytes) -> bool:
        return key in self.stored

    def touch(self, key: bytes) -> None:
        if key in self.stored:
            self.touched.append(key)

    def lacks(self, key: bytes) -> bool:
        return key not in self.stored and self._random.random() >= self._refuse

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        assert num_tokens > 0
        assert all(map(self.has, keys))
        return self._random.random() >= self._refuse

    def keep_up(self) -> None:
        pass

    def store(self, job: Store) -> None:
        parts = [entry for entry in job.entries if isinstance(entry, StatePart)]
        runs = [entry for entry in job.entries if isinstance(entry, Run)]
        assert [part.number for part in parts] in ([], list(range(STATE_PARTS)))
        assert len(runs) <= 1
        assert all(len(run.pages) == self.run_pages or 0 < len(run.pages) < self.run_pages for run in runs)
        assert parts or len(runs[0].pages) == self.run_pages
        self._stores.append((job, self._read(job)))

    def restore(self, job: Restore) -> None:
        runs = [entry for entry in job.entries if isinstance(entry, Run)]
        assert all(run.first == 0 for run in runs[1:])
        assert all(0 <= run.first < run.first + len(run.pages) <= self.run_pages for run in runs)
        assert all(run.first + len(run.pages) == self.run_pages for run in runs[:-1])
        self._restores.append(job)
        self._spoil(job.entries)

    def advance(self, patience: float) -> None:
        """Finish a copy of each kind with this probability."""
        if self._stores and self._random.random() < patience:
            job, before = self._stores.pop(0)
            assert self._read(job) == before, "a page or a state was changed while it was copied"
            self.stored |= {entry.key: self._value(entry) for entry in job.entries if not self.has(entry.key)}
            job.done = True
        if self._restores and self._random.random() < patience:
            self._finish(self._restores.pop(0))

    def _finish(self, job: Restore) -> None:
        self._spoil(job.entries)
        for entry in job.entries:
            if self._random.random() < self._ill:
                self.stored.pop(entry.key, None)
            if entry.key not in self.stored:
                break
            self._write(entry)
            job.num_restored += 1
        job.done = True

    def _write(self, entry: Entry) -> None:
        stored = self.stored[entry.key]
        if isinstance(entry, StatePart):
            assert isinstance(stored, int)
            last = entry.number == STATE_PARTS - 1
            self.states[entry.slot] = stored if last else -1
            self.restored_states += last
            return
        assert not isinstance(stored, int)
        wanted = stored[entry.first : entry.first + len(entry.pages)]
        assert len(wanted) == len(entry.pages), "more pages than are stored"
        for page, slots in zip(entry.pages, wanted, strict=True):
            for slot, value in enumerate(slots):
                if value is not None:
                    self.pool[page, slot] = value
        self.restored_pages += len(wanted)

    def _read(self, job: Store) -> list[list[list[Slot]] | int]:
        return [self._value(entry) for entry in job.entries]

    def _value(self, entry: Entry) -> list[list[Slot]] | int:
        if isinstance(entry, StatePart):
            return self.states[entry.slot]
        return [[self.pool.get((page, slot)) for slot in range(self._page_tokens)] for page in entry.pages]

    def _spoil(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, StatePart):
                self.states[entry.slot] = -1
                continue
            for page in entry.pages:
                for slot in range(self._page_tokens):
                    self.pool[page, slot] = (-1, -1, "")
