"""Downloads repository files into the cache: in parallel, resumable, with hash checks.

huggingface_hub's own downloader (2.x) discards a partial file when the process ends, and shards have gigabytes; this
one resumes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from proa.errors import HubError, ResourceError
from proa.hub.api import Hub, TransientError
from proa.hub.cache import RepoCache, cache_root
from proa.hub.repository import HubFile, Repository

_PARALLEL_FILES = 4  # one connection rarely uses the full bandwidth

Arrived = Callable[[int], None]


class _StoppedError(Exception):
    """Raised in a download thread after another file's download has failed."""


def fetch_files(hub: Hub, repository: Repository, files: Sequence[HubFile], arrived: Arrived) -> None:
    """Download missing files in parallel; link each into the snapshot when it is complete and its hash matches.

    `arrived` is called with the number of new bytes: also for bytes left by an earlier run, and with a negative number
    when bytes are discarded. Raises HubError and ResourceError (disk full or not writable); partial files are kept.
    """
    lock, stop = threading.Lock(), threading.Event()

    def count(num_bytes: int) -> None:
        with lock:
            arrived(num_bytes)
        if stop.is_set():
            raise _StoppedError

    def fetch(file: HubFile) -> None:
        try:
            _fetch(hub, repository, file, count)
        except OSError as error:
            stop.set()
            raise ResourceError(
                f"{file.path} cannot be written to {cache_root()}: {error.strerror or error}.",
                "Free some space, or set HF_HUB_CACHE to a writable folder. Bytes already downloaded are kept.",
            ) from error
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="proa-hub") as pool:
        futures = [pool.submit(fetch, file) for file in files]
        try:
            errors = [error for future in futures if (error := future.exception())]
        except BaseException:  # Ctrl-C is raised here, in the main thread, not in the pool's threads
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if errors:
        raise min(errors, key=lambda e: isinstance(e, _StoppedError))


def _fetch(hub: Hub, repository: Repository, file: HubFile, arrived: Arrived) -> None:
    """Download one file, resuming a partial one, and link it into the snapshot. Raises HubError."""
    cache = RepoCache(repository.reference.repo)
    blob, lock = cache.blob(file.etag), cache.lock(file.etag)
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if blob.exists():
            arrived(file.size_bytes)
        else:
            partial = _partial(blob)
            _receive(hub, repository, file, partial, arrived)
            _check(partial, file, repository)
            partial.replace(blob)
    cache.link(repository.commit, file.path, file.etag)


def missing_bytes(repository: Repository, files: Sequence[HubFile]) -> int:
    """Return the number of bytes still to be downloaded."""
    cache = RepoCache(repository.reference.repo)
    return sum(f.size_bytes - _present_bytes(cache.blob(f.etag)) for f in files)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _present_bytes(blob: Path) -> int:
    return next((path.stat().st_size for path in (blob, _partial(blob)) if path.is_file()), 0)


def _receive(hub: Hub, repository: Repository, file: HubFile, partial: Path, arrived: Arrived) -> None:
    """Append to `partial` until it is complete. Reconnects after a broken connection; raises HubError after several
    attempts in a row without new bytes."""
    partial.touch()
    if partial.stat().st_size > file.size_bytes:
        os.truncate(partial, 0)
    arrived(partial.stat().st_size)
    failures = 0
    while (have := partial.stat().st_size) < file.size_bytes:
        error = HubError(
            f"The download of {file.path} of {repository.reference} stopped at {have} of {file.size_bytes} bytes in "
            "several attempts.",
            "Try again later, or set HF_ENDPOINT to another mirror.",
        )
        try:
            _append(hub, repository, file, partial, arrived)
        except TransientError as caught:
            error = caught.error
        if partial.stat().st_size > have:
            failures = 0
            continue
        if failures == len(hub.retry_delays_s):
            raise error
        time.sleep(hub.retry_delays_s[failures])
        failures += 1


def _append(hub: Hub, repository: Repository, file: HubFile, partial: Path, arrived: Arrived) -> None:
    have = partial.stat().st_size
    with hub.open_from(repository, file, have) as (start, chunks), partial.open("ab") as out:
        if start != have:  # the server does not support ranges
            out.truncate(start)
            arrived(start - have)
        for chunk in chunks:
            out.write(chunk)
            arrived(len(chunk))


def _check(partial: Path, file: HubFile, repository: Repository) -> None:
    """Check the size and the hash (sha256 for large files, git's blob hash for others); delete the file and raise
    HubError if one is wrong."""
    size = partial.stat().st_size
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with partial.open("rb") as stream:
        hashlib.file_digest(stream, lambda: digest)
    if size != file.size_bytes or digest.hexdigest() != file.etag:
        partial.unlink()
        raise HubError(
            f"{file.path} of {repository.reference} arrived damaged: {size} of {file.size_bytes} bytes, "
            f"hash {digest.hexdigest()} instead of {file.etag}. It was deleted.",
            "Run the same command again; if the error repeats, check the proxy or mirror.",
        )
