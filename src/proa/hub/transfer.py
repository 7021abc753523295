"""Brings files of a repository into the cache. Belongs here: resuming, checking, doing several at once. Never: which.

huggingface_hub's own downloader (2.x) throws a partial file away when the process ends, and shards are gigabytes;
this one continues where the bytes stop.
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

_PARALLEL_FILES = 4  # one connection rarely fills a line
_HASH_CHUNK_BYTES = 1 << 20

Arrived = Callable[[int], None]


class _StoppedError(Exception):
    """Another file failed."""


def fetch_files(hub: Hub, repository: Repository, files: Sequence[HubFile], arrived: Arrived) -> None:
    """Fetch what is missing, in parallel, each file linked into the snapshot when it is complete and its hash right.

    `arrived` hears of bytes as they come, negative ones when they had to be thrown away; also of those that a
    former run left. Raises HubError and ResourceError (disk full, not writable), and keeps what came.
    """
    lock, stop = threading.Lock(), threading.Event()

    def count(num_bytes: int) -> None:
        with lock:
            arrived(num_bytes)
        if stop.is_set():
            raise _StoppedError

    def fetch(file: HubFile) -> None:
        try:
            fetch_file(hub, repository, file, count)
        except OSError as error:
            stop.set()
            raise ResourceError(
                f"{file.path} cannot be written to {cache_root()}: {error.strerror or error}.",
                "Free some space, or set HF_HUB_CACHE to a folder you can write. What was fetched is kept.",
            ) from error
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="proa-hub") as pool:
        futures = [pool.submit(fetch, file) for file in files]
        try:
            errors = [error for future in futures if (error := future.exception())]
        except BaseException:  # Ctrl-C lands here, not in the threads
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if errors:
        raise min(errors, key=lambda e: isinstance(e, _StoppedError))


def fetch_file(hub: Hub, repository: Repository, file: HubFile, arrived: Arrived) -> Path:
    """One file, resumed if it was begun; returns its place in the snapshot."""
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
    return cache.link(repository.commit, file.path, file.etag)


def missing_bytes(repository: Repository, files: Sequence[HubFile]) -> int:
    """What is still to be fetched."""
    cache = RepoCache(repository.reference.repo)
    return sum(f.size_bytes - _present_bytes(cache.blob(f.etag)) for f in files)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _present_bytes(blob: Path) -> int:
    return next((path.stat().st_size for path in (blob, _partial(blob)) if path.is_file()), 0)


def _receive(hub: Hub, repository: Repository, file: HubFile, partial: Path, arrived: Arrived) -> None:
    """Append to `partial` until it is whole. A cut connection is taken up again as long as bytes keep coming."""
    partial.touch()
    if partial.stat().st_size > file.size_bytes:
        os.truncate(partial, 0)
    arrived(partial.stat().st_size)
    failures = 0
    while (have := partial.stat().st_size) < file.size_bytes:
        error = HubError(f"{file.path} of {repository.reference} ends early, again and again.", "Try another mirror.")
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
        if start != have:  # the server cannot continue a file
            out.truncate(start)
            arrived(start - have)
        for chunk in chunks:
            out.write(chunk)
            arrived(len(chunk))


def _check(partial: Path, file: HubFile, repository: Repository) -> None:
    """Large files have a sha256, small ones git's hash. Removes what is wrong."""
    size = partial.stat().st_size
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with partial.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    if size != file.size_bytes or digest.hexdigest() != file.etag:
        partial.unlink()
        raise HubError(
            f"{file.path} of {repository.reference} arrived damaged: {size} of {file.size_bytes} bytes, "
            f"hash {digest.hexdigest()} instead of {file.etag}. It was deleted.",
            "Run the same command again; if that repeats, suspect the proxy or mirror.",
        )
