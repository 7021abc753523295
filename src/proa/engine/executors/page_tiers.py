"""Stores KV pages and copies of recurrent states in RAM and in files and restores them, by threads beside the engine's.
Never: which ones, requests.

One thread writes, with a low priority, so that workers that compute come first; several read, so that one can copy
into the caches while another waits for the disk. None of them is bound to a CPU of its own. An entry in RAM is copied
between its buffer and the caches without a copy between. A reader takes a few entries in RAM at a time and waits once
for all of them: a wait for each, and for Python's lock after it, would leave PCIe idle.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor

from proa.cache.files import FileStore
from proa.cache.ram import RamStore
from proa.engine.executors.page_copies import AT_ONCE, layout_of, new_buffer, new_pages
from proa.engine.executors.restore_rates import RestoreRates, Tier
from proa.engine.executors.state_parts import StateParts
from proa.engine.scheduling.tiers import Entry, Restore, Run, Store
from proa.engine.stats import PrefixFileStats, PrefixRamStats
from proa.ops.caches import Caches

log = logging.getLogger(__name__)

READERS = 2
BUFFERS = READERS + 1  # of an entry each, in RAM, if there are files
_WARM_UP_S = 60.0  # more than any warm-up takes: then a thread has failed
# Above a worker's nice value: a tenth of its CPU time where no CPU is idle. With 0, decode on two CPUs has half its
# speed while a prefix is restored (0.5 to 0.9 s), with 10 it is 2 to 3 % slower (2.0 to 3.4 s); at 19 writing stalls.
_NICE = 10


class EntryCopies:
    """Copies entries between the caches and buffers of one size. One object per thread."""

    def __init__(self, caches: Caches, run_pages: int) -> None:
        """Raises ValueError if no cache has pages."""
        self._layout = layout_of(caches, run_pages)
        self._pages = new_pages(self._layout)
        self.device, self.nbytes = self._layout.rows[0].device, self._layout.nbytes
        self._states = StateParts(caches, self.nbytes)
        self.state_parts = self._states.count
        self.warm_up, self.finish = self._pages.warm_up, self._pages.finish

    def new_buffer(self) -> Tensor:
        return new_buffer(self._layout)

    def read(self, entry: Entry, into: Tensor) -> None:
        if isinstance(entry, Run):
            self._pages.read(entry.pages, into)
        else:
            self._states.read(entry.slot, entry.number, into)

    def begin_write(self, source: Tensor, entry: Entry) -> None:
        """Write an entry, which is there after `finish`; `source` must not change before that."""
        if isinstance(entry, Run):
            self._pages.begin_write(source, entry.first, entry.pages)
        else:
            self._states.write(source, entry.slot, entry.number)

    def write(self, source: Tensor, entry: Entry) -> None:
        self.begin_write(source, entry)
        self.finish()


@dataclass
class _Restored:
    """Amounts restored from a tier."""

    pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class PageTiers:
    """The tiers of scheduling/tiers.py: RAM first, then files. One thread calls `keep_up`, `store`, `restore` and
    `learn`."""

    def __init__(
        self, root: bytes, run_pages: int, new_copies: Callable[[], EntryCopies], cpus: Collection[int],
        files: FileStore | None = None, ram: RamStore | None = None, *, worker_nice: int = 0,
    ) -> None:  # fmt: skip
        """cpus: CPUs that the threads may run on. files, ram: None if there is no such tier.
        worker_nice: the nice value of workers, above the process's."""
        self.root, self.run_pages = root, run_pages
        self._files, self._ram, self._new_copies, self._cpus = files, ram, new_copies, cpus
        self._nice = worker_nice + _NICE
        self._stores: list[RamStore | FileStore] = [store for store in (ram, files) if store is not None]
        copies = new_copies()
        self._entry_bytes, self.state_parts = copies.nbytes, copies.state_parts
        self._own = threading.local()
        self._kept: list[EntryCopies] = []  # of all threads: a forked process drops what only a threading.local holds
        self._writer = ThreadPoolExecutor(1, "prefix-writer", self._begin_thread)
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader", self._begin_thread)
        self._keeping_up: Future[None] = Future()
        self._keeping_up.set_result(None)
        self._lock = threading.Lock()
        self._rates = RestoreRates()
        self._restored: dict[Tier, _Restored] = {"ram": _Restored(), "files": _Restored()}
        self._written: dict[Tier, int] = {"ram": 0, "files": 0}  # entries
        if copies.device.type == "cuda":
            self._warm_up()

    def has(self, key: bytes) -> bool:
        return any(store.has(key) for store in self._stores)

    def touch(self, key: bytes) -> None:
        for store in self._stores:
            store.touch(key)

    def lacks(self, key: bytes) -> bool:
        return any(store.writes and not store.has(key) for store in self._stores)

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        in_ram = 0 if self._ram is None else sum(map(self._ram.has, keys))
        entries: dict[Tier, int] = {"ram": in_ram, "files": len(keys) - in_ram}
        nbytes = {tier: count * self._entry_bytes for tier, count in entries.items()}
        return self._rates.worthwhile(nbytes, num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step with this many tokens of prompts."""
        self._rates.learn(num_tokens, seconds)

    def keep_up(self) -> None:
        if self._files is not None and self._files.is_behind and self._keeping_up.done():
            self._keeping_up = self._writer.submit(self._files.keep_up)

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
            written_bytes=self._written["files"] * self._entry_bytes,
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
            written_bytes=self._written["ram"] * self._entry_bytes,
            evicted_runs=ram.evicted_runs if ram else 0,
        )

    def close(self) -> None:
        """End the threads after their current copies; no call may follow."""
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._ram is not None:
            self._ram.close()

    def in_ram(self, key: bytes) -> bool:
        return self._ram is not None and self._ram.has(key)

    def _warm_up(self) -> None:
        """Start all threads and warm up their copies, so that no restore waits for it. Raises torch.OutOfMemoryError.
        One after another: the first one loads the kernels."""
        self._writer.submit(lambda: self._own.copies.warm_up()).result(_WARM_UP_S)
        all_here = threading.Barrier(READERS, timeout=_WARM_UP_S)

        def one() -> None:
            all_here.wait()  # so that each thread takes one
            self._own.copies.warm_up()

        for started in [self._readers.submit(one) for _ in range(READERS)]:
            started.result(_WARM_UP_S)

    def _begin_thread(self) -> None:
        with suppress(OSError):  # not permitted: the thread keeps the affinity or priority that it has
            os.sched_setaffinity(0, self._cpus)
        with suppress(OSError):
            os.nice(self._nice)  # of this thread alone, on Linux
        self._own.copies = self._new_copies()
        self._kept.append(self._own.copies)
        if self._files is not None:
            self._own.buffer = self._own.copies.new_buffer()

    def _store(self, job: Store) -> None:
        try:
            for entry in job.entries:
                if self._ram is not None:
                    self._store_in_ram(self._ram, entry)
                if self._files is not None:
                    self._store_in_file(self._files, entry)
        except Exception:
            log.exception("A part of the prefix cache could not be stored; its tokens will be computed again.")
        finally:
            job.done = True

    def _store_in_ram(self, ram: RamStore, entry: Entry) -> None:
        with ram.filling(entry.key) as filling:
            if filling is not None:
                self._own.copies.read(entry, filling.buffer)
                filling.full = True
                self._written["ram"] += 1

    def _store_in_file(self, files: FileStore, entry: Entry) -> None:
        if not files.writes or files.has(entry.key):
            return
        with self._in_ram(entry.key) as buffer:
            if buffer is None:
                buffer = self._own.buffer
                self._own.copies.read(entry, buffer)
            if files.write(entry.key, _bytes_of(buffer)):
                self._written["files"] += 1

    def read_entries(self, entries: Sequence[Entry]) -> list[Tier]:
        """Restore entries, up to the first that has vanished. Returns where they were. Called in a reading thread."""
        found: list[Tier] = []
        with ExitStack() as held:
            try:
                for entry in entries:
                    buffer = held.enter_context(self._in_ram(entry.key))
                    if buffer is not None:
                        self._own.copies.begin_write(buffer, entry)
                    elif self._files is None or not self._read_file(self._files, entry):
                        break
                    found.append("files" if buffer is None else "ram")
            finally:
                self._own.copies.finish()  # before buffers may be evicted, and pages used
        return found

    def _read_file(self, files: FileStore, entry: Entry) -> bool:
        """Restore an entry from its file, and keep it in RAM if there is room."""
        if self._ram is None:
            return self._copy_file(files, entry, self._own.buffer)
        with self._ram.filling(entry.key) as filling:
            good = self._copy_file(files, entry, self._own.buffer if filling is None else filling.buffer)
            if filling is not None:
                filling.full = good
        return good

    def _copy_file(self, files: FileStore, entry: Entry, buffer: Tensor) -> bool:
        if not files.read(entry.key, _bytes_of(buffer)):
            return False
        self._own.copies.write(buffer, entry)
        return True

    @contextmanager
    def _in_ram(self, key: bytes) -> Iterator[Tensor | None]:
        """The buffer of an entry in RAM, which is not evicted meanwhile; None: it is not there."""
        if self._ram is None:
            yield None
            return
        with self._ram.reading(key) as buffer:
            yield buffer

    def restored(self, tier: Tier, entries: Sequence[Entry], seconds: float) -> None:
        """Record how much a restore has read from a tier, and how long that took."""
        nbytes = len(entries) * self._entry_bytes
        with self._lock:
            counts = self._restored[tier]
            counts.pages += sum(len(entry.pages) for entry in entries if isinstance(entry, Run))
            counts.nbytes += nbytes
            counts.seconds += seconds
            if entries:
                self._rates.restore[tier].add(nbytes, seconds)


class _Restoring:
    """A restore, whose entries the reading threads take one after another."""

    def __init__(self, tiers: PageTiers, job: Restore) -> None:
        self._tiers, self._job = tiers, job
        self._lock = threading.Lock()
        self._from: list[Tier | None] = [None] * len(job.entries)
        self._busy_s: dict[Tier, float] = {"ram": 0.0, "files": 0.0}  # of threads
        self._left = len(job.entries)
        self._failed = False
        self._began_s: float | None = None

    def submit_to(self, readers: ThreadPoolExecutor) -> None:
        for numbers in self._shares():
            readers.submit(self._read, numbers)

    def _shares(self) -> Iterator[range]:
        """The entries in parts, each for one call of a thread: those in RAM AT_ONCE together, unless threads would have
        nothing to do; others alone."""
        entries, here = self._job.entries, self._tiers.in_ram
        most, first = min(AT_ONCE, -(-len(entries) // READERS)), 0
        while first < len(entries):
            limit, end = min(first + most, len(entries)) if here(entries[first].key) else first + 1, first + 1
            while end < limit and here(entries[end].key):
                end += 1
            yield range(first, end)
            first = end

    def _read(self, numbers: range) -> None:
        began_s = time.perf_counter()
        self._began_s = self._began_s or began_s
        found: list[Tier] = []
        try:
            if not self._failed:
                found = self._tiers.read_entries(self._job.entries[numbers.start : numbers.stop])
        except Exception:
            log.exception("A part of the prefix cache could not be restored; its tokens are computed again.")
        ended_s = time.perf_counter()
        self._failed = self._failed or len(found) < len(numbers)
        with self._lock:
            for number, tier in zip(numbers, found, strict=False):
                self._from[number] = tier
                self._busy_s[tier] += (ended_s - began_s) / len(found)
            self._left -= len(numbers)
            last = self._left == 0
        if last:
            self._end(ended_s - self._began_s)

    def _end(self, seconds: float) -> None:
        """Count the leading entries that were restored. The time is divided over the tiers in proportion to the
        threads' time."""
        good = next((number for number, tier in enumerate(self._from) if tier is None), len(self._from))
        self._job.num_restored = good
        busy_s = sum(self._busy_s.values()) or 1.0
        for tier, tier_s in self._busy_s.items():
            entries = [self._job.entries[number] for number in range(good) if self._from[number] == tier]
            self._tiers.restored(tier, entries, seconds * tier_s / busy_s)
        self._job.done = True


def _bytes_of(buffer: Tensor) -> memoryview:
    return buffer.numpy().data
