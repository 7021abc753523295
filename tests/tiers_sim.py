"""Tiers whose copies finish late, in any state of health, over the page pool of a FakeEngine. Never: tests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from proa.engine.scheduling.tiers import Restore, Store

Pool = dict[tuple[int, int], tuple[int, int, str]]  # (page, slot) -> anything


class SimTiers:
    """root, run_pages: see Tiers. Copies finish in the order of their calls, when `advance` says."""

    root = b"sim"

    def __init__(
        self, random: Random, run_pages: int, page_tokens: int, *, ill: float = 0.0, refuse: float = 0.0
    ) -> None:
        """ill: probability that a run has vanished or is damaged when it is read. refuse: that restoring is predicted
        to be slower, or writing is paused."""
        self.run_pages, self._random, self._page_tokens = run_pages, random, page_tokens
        self._ill, self._refuse = ill, refuse
        self.pool: Pool = {}
        self.runs: dict[bytes, list[list[tuple[int, int, str] | None]]] = {}
        self.touched: list[bytes] = []
        self._stores: list[tuple[Store, object]] = []
        self._restores: list[Restore] = []
        self.restored_pages = 0

    def has(self, key: bytes) -> bool:
        return key in self.runs

    def touch(self, key: bytes) -> None:
        if key in self.runs:
            self.touched.append(key)

    def lacks(self, key: bytes) -> bool:
        return key not in self.runs and self._random.random() >= self._refuse

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        assert num_tokens > 0
        assert all(map(self.has, keys))
        return self._random.random() >= self._refuse

    def store(self, job: Store) -> None:
        assert len(job.pages) == self.run_pages
        self._stores.append((job, self._read(job.pages)))

    def restore(self, job: Restore) -> None:
        assert 0 < job.num_skipped + len(job.pages) <= len(job.keys) * self.run_pages
        assert job.num_skipped < self.run_pages
        assert job.num_skipped + len(job.pages) > (len(job.keys) - 1) * self.run_pages
        self._restores.append(job)
        self._spoil(job.pages)

    def advance(self, patience: float) -> None:
        """Finish a copy of each kind with this probability."""
        if self._stores and self._random.random() < patience:
            job, before = self._stores.pop(0)
            assert self._read(job.pages) == before, "a page was changed while it was copied"
            self.runs[job.key] = self._read(job.pages)
            job.done = True
        if self._restores and self._random.random() < patience:
            self._finish(self._restores.pop(0))

    def _finish(self, job: Restore) -> None:
        wanted: list[list[tuple[int, int, str] | None]] = []
        for key in job.keys:
            if self._random.random() < self._ill:
                self.runs.pop(key, None)
            if key not in self.runs:
                break
            wanted += self.runs[key]
        wanted = wanted[job.num_skipped :][: len(job.pages)]
        self._spoil(job.pages)
        for page, slots in zip(job.pages, wanted, strict=False):
            for slot, value in enumerate(slots):
                if value is not None:
                    self.pool[page, slot] = value
        job.num_pages = len(wanted)
        self.restored_pages += len(wanted)
        job.done = True

    def _read(self, pages: Sequence[int]) -> list[list[tuple[int, int, str] | None]]:
        return [[self.pool.get((page, slot)) for slot in range(self._page_tokens)] for page in pages]

    def _spoil(self, pages: Sequence[int]) -> None:
        for page in pages:
            for slot in range(self._page_tokens):
                self.pool[page, slot] = (-1, -1, "")
