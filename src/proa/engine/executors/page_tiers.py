"""Stores runs of KV pages in RAM and in files and restores them, by threads beside the engine's. Never: which runs,
requests.

One thread writes, with a low priority, so that workers that compute come first; several read, so that one can copy
into the KV cache while another waits for the disk. None of them is bound to a CPU of its own. A run in RAM is copied
between its buffer and the pages without a copy between.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from proa.cache.files import FileStore
from proa.cache.ram import RamStore
from proa.engine.executors.page_copies import PageCopies
from proa.engine.executors.restore_rates import RestoreRates, Tier
from proa.engine.scheduling.tiers import Restore, Store
from proa.engine.stats import PrefixFileStats, PrefixRamStats

log = logging.getLogger(__name__)

READERS = 2
BUFFERS = READERS + 1  # of a run each, in RAM, if there are files
_WRITER_NICE = 10  # a tenth of the CPU time of a thread that computes; at 19 the writer stalls for seconds


class RunStore(Protocol):
    """The interface of both tiers. No method blocks."""

    @property
    def writes(self) -> bool:
        """Whether runs can be stored now."""

    def has(self, key: bytes) -> bool: ...

    def touch(self, key: bytes) -> None: ...


@dataclass
class _Restored:
    """Amounts restored from a tier."""

    pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class PageTiers:
    """The tiers of scheduling/tiers.py: RAM first, then files. `store`, `restore` and `learn` are called from one
    thread."""

    def __init__(
        self, root: bytes, run_pages: int, new_copies: Callable[[], PageCopies], cpus: Collection[int],
        files: FileStore | None = None, ram: RamStore | None = None,
    ) -> None:  # fmt: skip
        """cpus: CPUs that the threads may run on. files, ram: None if there is no such tier."""
        self.root, self.run_pages = root, run_pages
        self._files, self._ram, self._new_copies, self._cpus = files, ram, new_copies, cpus
        self._stores: tuple[RunStore, ...] = tuple(store for store in (ram, files) if store is not None)
        self._run_bytes = new_copies().run_bytes
        self._own = threading.local()
        self._writer = ThreadPoolExecutor(1, "prefix-writer", self._begin_thread, (_WRITER_NICE,))
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader", self._begin_thread, (0,))
        self._lock = threading.Lock()
        self._rates = RestoreRates()
        self._restored: dict[Tier, _Restored] = {"ram": _Restored(), "files": _Restored()}
        self._written: dict[Tier, int] = {"ram": 0, "files": 0}  # runs

    def has(self, key: bytes) -> bool:
        return any(store.has(key) for store in self._stores)

    def touch(self, key: bytes) -> None:
        for store in self._stores:
            store.touch(key)

    def lacks(self, key: bytes) -> bool:
        return any(store.writes and not store.has(key) for store in self._stores)

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        in_ram = 0 if self._ram is None else sum(map(self._ram.has, keys))
        nbytes: dict[Tier, int] = {"ram": in_ram * self._run_bytes, "files": (len(keys) - in_ram) * self._run_bytes}
        return self._rates.worthwhile(nbytes, num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of this many tokens."""
        self._rates.learn(num_tokens, seconds)

    def store(self, job: Store) -> None:
        self._writer.submit(self._store, job)

    def restore(self, job: Restore) -> None:
        _Restoring(self, job).submit_to(self._readers)

    def file_stats(self) -> PrefixFileStats:
        """Counters of files; the rate of prefill and the number of refusals are those of all tiers."""
        files, restored = self._files, self._restored["files"]
        return PrefixFileStats(
            stored_bytes=files.stored_bytes if files else 0,
            foreign_files=files.foreign_files if files else 0,
            restore_bytes_per_s=self._rates.restore["files"].value or 0.0,
            prefill_tokens_per_s=self._rates.prefill.value or 0.0,
            restored_pages=restored.pages,
            restored_bytes=restored.nbytes,
            restore_seconds=restored.seconds,
            refused_restores=self._rates.refused,
            written_files=self._written["files"],
            written_bytes=self._written["files"] * self._run_bytes,
            evicted_files=files.evicted_files if files else 0,
            bad_files=files.bad_files if files else 0,
            failed_writes=files.failed_writes if files else 0,
        )

    def ram_stats(self) -> PrefixRamStats:
        ram, restored = self._ram, self._restored["ram"]
        return PrefixRamStats(
            stored_bytes=ram.stored_bytes if ram else 0,
            restore_bytes_per_s=self._rates.restore["ram"].value or 0.0,
            restored_pages=restored.pages,
            restored_bytes=restored.nbytes,
            restore_seconds=restored.seconds,
            written_runs=self._written["ram"],
            written_bytes=self._written["ram"] * self._run_bytes,
            evicted_runs=ram.evicted_runs if ram else 0,
        )

    def close(self) -> None:
        """End the threads after their current copies; no call may follow."""
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._ram is not None:
            self._ram.close()

    def _begin_thread(self, nice: int) -> None:
        with suppress(OSError):  # not permitted: the thread keeps the affinity or priority that it has
            os.sched_setaffinity(0, self._cpus)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        self._own.copies = self._new_copies()
        if self._files is not None:
            self._own.buffer = self._own.copies.new_buffer()

    def _store(self, job: Store) -> None:
        try:
            if self._ram is not None:
                self._store_in_ram(self._ram, job)
            if self._files is not None:
                self._store_in_file(self._files, job)
                self._files.keep_up()
        except Exception:
            log.exception("A part of the prefix cache could not be stored; its tokens will be computed again.")
        finally:
            job.done = True

    def _store_in_ram(self, ram: RamStore, job: Store) -> None:
        with ram.filling(job.key) as filling:
            if filling is not None:
                self._own.copies.read(job.pages, filling.buffer)
                filling.full = True
                self._written["ram"] += 1

    def _store_in_file(self, files: FileStore, job: Store) -> None:
        if not files.writes or files.has(job.key):
            return
        with self._in_ram(job.key) as buffer:
            if buffer is None:
                buffer = self._own.buffer
                self._own.copies.read(job.pages, buffer)
            if files.write(job.key, _bytes_of(buffer)):
                self._written["files"] += 1

    def read_run(self, key: bytes, first: int, pages: Sequence[int]) -> Tier | None:
        """Restore the pages [first : first + len(pages)] of a run. Returns where it was; None: it has vanished. Called
        in a reading thread."""
        with self._in_ram(key) as buffer:
            if buffer is not None:
                self._own.copies.write(buffer, first, pages)
                return "ram"
        found = self._files is not None and self._read_file(self._files, key, first, pages)
        return "files" if found else None

    def _read_file(self, files: FileStore, key: bytes, first: int, pages: Sequence[int]) -> bool:
        """Restore a run from its file, and keep it in RAM if there is room."""
        if self._ram is None:
            return self._copy_file(files, key, self._own.buffer, first, pages)
        with self._ram.filling(key) as filling:
            buffer = self._own.buffer if filling is None else filling.buffer
            good = self._copy_file(files, key, buffer, first, pages)
            if filling is not None:
                filling.full = good
        return good

    def _copy_file(self, files: FileStore, key: bytes, buffer: Tensor, first: int, pages: Sequence[int]) -> bool:
        if not files.read(key, _bytes_of(buffer)):
            return False
        self._own.copies.write(buffer, first, pages)
        return True

    @contextmanager
    def _in_ram(self, key: bytes) -> Iterator[Tensor | None]:
        """The buffer of a run in RAM, which is not evicted meanwhile; None: it is not there."""
        if self._ram is None:
            yield None
            return
        with self._ram.reading(key) as buffer:
            yield buffer

    def restored(self, tier: Tier, num_pages: int, num_runs: int, seconds: float) -> None:
        """Record how much a restore has read from a tier, and how long that took."""
        nbytes = num_runs * self._run_bytes
        with self._lock:
            counts = self._restored[tier]
            counts.pages += num_pages
            counts.nbytes += nbytes
            counts.seconds += seconds
            if num_runs:
                self._rates.restore[tier].add(nbytes, seconds)


class _Restoring:
    """A restore, whose runs the reading threads take one after another."""

    def __init__(self, tiers: PageTiers, job: Restore) -> None:
        self._tiers, self._job = tiers, job
        self._lock = threading.Lock()
        self._from: list[Tier | None] = [None] * len(job.keys)
        self._busy_s: dict[Tier, float] = {"ram": 0.0, "files": 0.0}  # of threads
        self._left = len(job.keys)
        self._failed = False
        self._began_s: float | None = None

    def submit_to(self, readers: ThreadPoolExecutor) -> None:
        for run in range(len(self._job.keys)):
            readers.submit(self._read, run)

    def _read(self, run: int) -> None:
        began_s = time.perf_counter()
        self._began_s = self._began_s or began_s
        try:
            if not self._failed:
                self._from[run] = self._tiers.read_run(self._job.keys[run], *self._wanted(run))
        except Exception:
            log.exception("A part of the prefix cache could not be restored; its tokens are computed again.")
        tier, ended_s = self._from[run], time.perf_counter()
        self._failed = self._failed or tier is None
        with self._lock:
            if tier is not None:
                self._busy_s[tier] += ended_s - began_s
            self._left -= 1
            last = self._left == 0
        if last:
            self._end(ended_s - self._began_s)

    def _wanted(self, run: int) -> tuple[int, Sequence[int]]:
        """The first page of the run that is wanted, and the pages that this one and the following ones go to."""
        size, skipped = self._tiers.run_pages, self._job.num_skipped
        first = skipped if run == 0 else 0
        return first, self._job.pages[max(0, run * size - skipped) : (run + 1) * size - skipped]

    def _end(self, seconds: float) -> None:
        """Count the leading runs that were restored. The time is divided over the tiers in
        proportion to the threads' time."""
        num_runs = next((run for run, tier in enumerate(self._from) if tier is None), len(self._from))
        self._job.num_pages = sum(len(self._wanted(run)[1]) for run in range(num_runs))
        busy_s = sum(self._busy_s.values()) or 1.0
        for tier, tier_s in self._busy_s.items():
            runs = [run for run in range(num_runs) if self._from[run] == tier]
            num_pages = sum(len(self._wanted(run)[1]) for run in runs)
            self._tiers.restored(tier, num_pages, len(runs), seconds * tier_s / busy_s)
        self._job.done = True


def _bytes_of(buffer: Tensor) -> memoryview:
    return buffer.numpy().data
