"""Stores runs of KV pages in files and restores them, by threads beside the engine's. Never: which runs, requests.

One thread writes, with a low priority, so that workers that compute come first; several read, so that one can copy
into the KV cache while another waits for the disk. None of them is bound to a CPU of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from proa.cache.files import FileStore
from proa.engine.executors.page_copies import PageCopies
from proa.engine.scheduling.tiers import Restore, Store
from proa.engine.stats import PrefixFileStats

log = logging.getLogger(__name__)

READERS = 2
BUFFERS = READERS + 1  # of a run each, in RAM
LEAST_PREFILL_TOKENS = 64  # a step with fewer says little about the rate of prefill
NEWEST_SHARE = 0.3  # weight of the newest value in a running average
TRY_EVERY = 16  # of so many refused restores, one is made: its rate may have been measured while the disk was busy
_WRITER_NICE = 10  # a tenth of the CPU time of a thread that computes; at 19 the writer stalls for seconds


class Rate:
    """A running average of a rate per second; None: not known yet."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, amount: float, seconds: float) -> None:
        rate = amount / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + NEWEST_SHARE * (rate - self.value)


class PageTiers:
    """The tiers of scheduling/tiers.py: here, files. `store`, `restore` and `learn` are called from one thread."""

    def __init__(
        self, files: FileStore, root: bytes, run_pages: int, new_copies: Callable[[], PageCopies], cpus: Collection[int]
    ) -> None:
        """cpus: what the threads may run on."""
        self.root, self.run_pages = root, run_pages
        self._files, self._new_copies, self._cpus = files, new_copies, cpus
        self._run_bytes = new_copies().run_bytes
        self._own = threading.local()
        self._writer = ThreadPoolExecutor(1, "prefix-writer", self._begin_thread, (_WRITER_NICE,))
        self._readers = ThreadPoolExecutor(READERS, "prefix-reader", self._begin_thread, (0,))
        self._lock = threading.Lock()
        self._restore_rate, self._prefill_rate = Rate(), Rate()
        self._refused = 0
        self._counts = dict.fromkeys(
            ("restored_pages", "restored_bytes", "restore_seconds", "written_bytes", "written_files"), 0.0
        )

    def has(self, key: bytes) -> bool:
        return self._files.has(key)

    def touch(self, key: bytes) -> None:
        self._files.touch(key)

    @property
    def writes(self) -> bool:
        return self._files.writes

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        bytes_per_s, tokens_per_s = self._restore_rate.value, self._prefill_rate.value
        if bytes_per_s is None or tokens_per_s is None:
            return True
        if len(keys) * self._run_bytes / bytes_per_s <= num_tokens / tokens_per_s:
            return True
        self._refused += 1
        return self._refused % TRY_EVERY == 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take the duration of a step of so many tokens."""
        if num_tokens >= LEAST_PREFILL_TOKENS:
            self._prefill_rate.add(num_tokens, seconds)

    def store(self, job: Store) -> None:
        self._writer.submit(self._store, job)

    def restore(self, job: Restore) -> None:
        _Restoring(self, job).submit_to(self._readers)

    def stats(self) -> PrefixFileStats:
        counts = self._counts
        return PrefixFileStats(
            stored_bytes=self._files.stored_bytes,
            foreign_files=self._files.foreign_files,
            restore_bytes_per_s=self._restore_rate.value or 0.0,
            prefill_tokens_per_s=self._prefill_rate.value or 0.0,
            restored_pages=int(counts["restored_pages"]),
            restored_bytes=int(counts["restored_bytes"]),
            restore_seconds=counts["restore_seconds"],
            refused_restores=self._refused,
            written_files=int(counts["written_files"]),
            written_bytes=int(counts["written_bytes"]),
            evicted_files=self._files.evicted_files,
            bad_files=self._files.bad_files,
            failed_writes=self._files.failed_writes,
        )

    def close(self) -> None:
        """End the threads after what they are doing; no call may follow."""
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin_thread(self, nice: int) -> None:
        with suppress(OSError):  # not permitted: the thread keeps the affinity or priority that it has
            os.sched_setaffinity(0, self._cpus)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        self._own.copies = self._new_copies()
        self._own.buffer = self._own.copies.new_buffer()

    def _store(self, job: Store) -> None:
        try:
            buffer = self._own.buffer
            self._own.copies.read(job.pages, buffer)
            if self._files.write(job.key, _bytes_of(buffer)):
                self._counts["written_files"] += 1
                self._counts["written_bytes"] += len(buffer)
            self._files.keep_up()
        except Exception:
            log.exception("A part of the prefix cache could not be stored; its tokens will be computed again.")
        finally:
            job.done = True

    def read_run(self, key: bytes, first: int, pages: Sequence[int]) -> bool:
        """Restore the pages [first : first + len(pages)] of a run. Called in a reading thread."""
        buffer = self._own.buffer
        if not self._files.read(key, _bytes_of(buffer)):
            return False
        self._own.copies.write(buffer, first, pages)
        return True

    def restored(self, num_pages: int, num_runs: int, seconds: float) -> None:
        with self._lock:
            self._counts["restored_pages"] += num_pages
            self._counts["restored_bytes"] += num_runs * self._run_bytes
            self._counts["restore_seconds"] += seconds
            if num_runs:
                self._restore_rate.add(num_runs * self._run_bytes, seconds)


class _Restoring:
    """A restore, of which the reading threads take run after run."""

    def __init__(self, tiers: PageTiers, job: Restore) -> None:
        self._tiers, self._job = tiers, job
        self._lock = threading.Lock()
        self._good = [False] * len(job.keys)
        self._left = len(job.keys)
        self._failed = False
        self._began_s: float | None = None

    def submit_to(self, readers: ThreadPoolExecutor) -> None:
        for run in range(len(self._job.keys)):
            readers.submit(self._read, run)

    def _read(self, run: int) -> None:
        self._began_s = self._began_s or time.perf_counter()
        try:
            if not self._failed:
                self._good[run] = self._tiers.read_run(self._job.keys[run], *self._wanted(run))
        except Exception:
            log.exception("A part of the prefix cache could not be restored; its tokens are computed again.")
        self._failed = self._failed or not self._good[run]
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._end(time.perf_counter() - self._began_s)

    def _wanted(self, run: int) -> tuple[int, Sequence[int]]:
        """The first page of the run that is wanted, and the pages that this one and the following ones go to."""
        size, skipped = self._tiers.run_pages, self._job.num_skipped
        first = skipped if run == 0 else 0
        return first, self._job.pages[max(0, run * size - skipped) : (run + 1) * size - skipped]

    def _end(self, seconds: float) -> None:
        num_runs = next((run for run, good in enumerate(self._good) if not good), len(self._good))
        most = num_runs * self._tiers.run_pages - self._job.num_skipped
        self._job.num_pages = max(0, min(len(self._job.pages), most))
        self._tiers.restored(self._job.num_pages, num_runs, seconds)
        self._job.done = True


def _bytes_of(buffer: Tensor) -> memoryview:
    return buffer.numpy().data
