"""Runs of pages as files: one file per run, checksummed, evicted least recently used first. Never: tensors, requests,
threads of its own.

A file is written under another name and renamed, so that a reader sees all of it or nothing. It is not synced: after a
power failure a file may have any contents, which its checksums show. Several engines may share the folder: a file may
appear or vanish at any time, and each engine keeps the whole folder, files of other models included, within its own
limit of bytes. Files contain what users wrote, so only their owner may read them (mode 0600).

`has`, `touch` and `is_behind` never block; all other methods read or write files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from proa.errors import ResourceError

log = logging.getLogger(__name__)

LAYOUT = 1  # raised with every change of a file's layout
SUFFIX, TEMPORARY = ".kv", ".tmp"
PIECE_BYTES = 1 << 20  # each piece has a CRC-32 of its own
PAUSE_S = 60.0  # without writing, after a write failed
LOOK_AGAIN_S = 5.0  # least time between two listings of the folder
SPARE_SHARE = 64  # of the limit: 1/64 is freed at once
STALE_S = 600.0  # a temporary file of this age belongs to an engine that was killed

# Only files with such names are counted and deleted: the folder may be one that other programs use too.
_RUN_NAME = re.compile(rf"[0-9a-f]{{12}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}")
_TEMPORARY_NAME = re.compile(rf"[0-9a-f]{{16}}{re.escape(TEMPORARY)}")

_HEAD = struct.Struct("<8sIIQ32s")  # magic, layout, number of pieces, payload bytes, name
_MAGIC = b"PROA KV\n"
_DIGEST_BYTES = 16


class _Held(NamedTuple):
    nbytes: int
    used_s: float  # modification time: when it was written or last read


class FileStore:
    """The runs of one root in a folder. Thread-safe.

    stored_bytes: size of all files of the folder when it was last listed, and of those written since. foreign_files:
    number of those of other models, KV types or versions. Both are counted with each change, because statistics are
    read after each step.
    """

    def __init__(self, folder: Path, root: bytes, limit_bytes: int) -> None:
        """Create the folder if it does not exist. Raises ResourceError if it cannot be created or listed."""
        self._folder, self._limit_bytes = folder, limit_bytes
        self._prefix = hashlib.blake2b(root, digest_size=6).hexdigest() + "-"
        self._lock = threading.Lock()
        self._files: dict[str, _Held] = {}  # name -> file, of all roots
        self._touched: dict[str, float] = {}  # name -> time of use
        self._paused_until_s = self._listed_s = 0.0
        self._warns_of_bad = self._warns_of_failed = True  # each warning is logged once
        self.stored_bytes = self.foreign_files = 0
        self.bad_files = self.failed_writes = self.evicted_files = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._list()
        except OSError as error:
            raise ResourceError(
                f"The folder of --prefix-cache-dir, {folder}, cannot be used: {error.strerror}.",
                "Name a folder that this user can create or read.",
            ) from error
        if self.foreign_files:
            log.info(
                "%s holds %d files of other models, types or versions, which are ignored.", folder, self.foreign_files
            )

    @property
    def writes(self) -> bool:
        """True unless writing is paused after a failure."""
        return time.monotonic() >= self._paused_until_s

    def has(self, key: bytes) -> bool:
        """True if the run was in the folder when it was last listed, or was written since."""
        return self._name(key) in self._files

    def touch(self, key: bytes) -> None:
        """Note that the run was used now; `keep_up`, or the next eviction, writes that to its file."""
        with self._lock:
            self._touched[self._name(key)] = time.time()

    @property
    def is_behind(self) -> bool:
        """True if the folder has not been listed for LOOK_AGAIN_S: time for `keep_up`."""
        return time.monotonic() - self._listed_s > LOOK_AGAIN_S

    def keep_up(self) -> None:
        """Apply touches, and list the folder again, to find what other engines have written and deleted."""
        self._apply_touches()
        try:
            self._list()
        except OSError:  # the folder has vanished: its files fail to open, one by one
            self._listed_s = time.monotonic()

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Write a run, and delete the least recently used files beyond the limit. Returns False if it was not written:
        the file exists, is larger than the limit, or writing is paused or fails now (disk full or read-only), which
        pauses it."""
        name = self._name(key)
        if not self.writes or name in self._files:
            return False
        head = _header(name, payload)
        nbytes = len(head) + len(payload)
        if nbytes > self._limit_bytes:
            return False
        temporary = self._folder / f"{secrets.token_hex(8)}{TEMPORARY}"  # engines in containers have equal process ids
        try:
            self._make_room(nbytes)
            _write(temporary, head, payload)
            os.rename(temporary, self._folder / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self._pause(error)
            return False
        self._record(name, _Held(nbytes, time.time()))
        return True

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a run of exactly len(into) bytes. Returns False, with `into` in any state, if the file has vanished or
        is not what was written, which is counted, and the file deleted. One that cannot be read is counted and stays:
        another user's may be, or one while this process has too many files open."""
        name = self._name(key)
        try:
            with open(self._folder / name, "rb", buffering=0) as file:
                why = _read(file.fileno(), name, into)
        except FileNotFoundError:
            self._record(name, None)
            return False
        except OSError as error:
            self._ignore(name, f"cannot be read: {error.strerror}")
            return False
        if why is None:
            self._use(name, time.time())
            return True
        with suppress(OSError):
            os.unlink(self._folder / name)
        self._ignore(name, why)
        return False

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}{key.hex()}{SUFFIX}"

    def _list(self) -> None:
        found, now_s = {}, time.time()
        for entry, stat in _entries(self._folder):
            if _RUN_NAME.fullmatch(entry):
                found[entry] = _Held(stat.st_size, stat.st_mtime)
            elif _TEMPORARY_NAME.fullmatch(entry) and now_s - stat.st_mtime > STALE_S:
                with suppress(OSError):
                    os.unlink(self._folder / entry)
        with self._lock:
            self._files, self._listed_s = found, time.monotonic()
            self.stored_bytes = sum(file.nbytes for file in found.values())
            self.foreign_files = sum(map(self._is_foreign, found))

    def _apply_touches(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        for name, used_s in touched.items():
            self._use(name, used_s)

    def _use(self, name: str, used_s: float) -> None:
        with self._lock:
            if name not in self._files or used_s <= self._files[name].used_s:
                return
            self._files[name] = self._files[name]._replace(used_s=used_s)
        with suppress(OSError):  # vanished, or read-only
            os.utime(self._folder / name, (used_s, used_s))

    def _record(self, name: str, file: _Held | None) -> None:
        """Note a file of the folder; None: it is there no more."""
        with self._lock:
            before = self._files.pop(name, None)
            if file is not None:
                self._files[name] = file
            self.stored_bytes += (file.nbytes if file else 0) - (before.nbytes if before else 0)
            if self._is_foreign(name):
                self.foreign_files += (file is not None) - (before is not None)

    def _is_foreign(self, name: str) -> bool:
        return not name.startswith(self._prefix)

    def _make_room(self, nbytes: int) -> None:
        """Delete the least recently used files until `nbytes` fit, and more, up to a share of the limit, so that not
        every run lists the folder. Raises OSError if they do not fit, because files cannot be deleted."""
        excess = self.stored_bytes + nbytes - self._limit_bytes
        if excess <= 0:
            return
        self.keep_up()  # another engine may have read or deleted some
        excess = self.stored_bytes + nbytes - self._limit_bytes
        if excess <= 0:
            return
        with self._lock:
            oldest = sorted(self._files.items(), key=lambda item: item[1].used_s)
        most = excess + self._limit_bytes // SPARE_SHARE
        failed: OSError | None = None
        for name, file in oldest:
            if excess <= 0 and file.nbytes > most:
                return
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:  # read-only, or another user's: it is there still, and may be restored
                failed = error
                continue
            self._record(name, None)
            self.evicted_files += 1
            excess, most = excess - file.nbytes, most - file.nbytes
        if failed is not None and excess > 0:
            raise failed

    def _pause(self, error: OSError) -> None:
        self.failed_writes += 1
        self._paused_until_s = time.monotonic() + PAUSE_S
        if self._warns_of_failed:
            self._warns_of_failed = False
            log.warning(
                "The prefix cache cannot be written to %s: %s. Serving and restoring go on, and writing is tried again "
                "every %d s. Free some space there, or correct its permissions.",
                self._folder, error.strerror, int(PAUSE_S),
            )  # fmt: skip

    def _ignore(self, name: str, why: str) -> None:
        self.bad_files += 1
        self._record(name, None)
        if self._warns_of_bad:
            self._warns_of_bad = False
            log.warning(
                "The prefix cache file %s %s. Its tokens are computed again; further such files are only counted "
                "(proa_prefix_file_bad_files_total).",
                self._folder / name, why,
            )  # fmt: skip


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Name and status of each file in the folder that has not vanished meanwhile."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                yield entry.name, entry.stat(follow_symlinks=False)


def _header(name: str, payload: memoryview) -> bytes:
    sums = [zlib.crc32(payload[i : i + PIECE_BYTES]) for i in range(0, len(payload), PIECE_BYTES)]
    head = _HEAD.pack(_MAGIC, LAYOUT, len(sums), len(payload), _named(name)) + struct.pack(f"<{len(sums)}I", *sums)
    return head + hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()


def _named(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def _write(path: Path, head: bytes, payload: memoryview) -> None:
    """Write a new file. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb", buffering=0) as file:
        for part in (memoryview(head), payload):
            at = 0
            while at < len(part):
                at += file.write(part[at:])


def _read(handle: int, name: str, into: memoryview) -> str | None:
    """Read a file's payload. Returns what is wrong with the file, or None. Raises OSError."""
    pieces = -(-len(into) // PIECE_BYTES)
    size = _HEAD.size + 4 * pieces
    head = os.read(handle, size + _DIGEST_BYTES)
    if len(head) < size + _DIGEST_BYTES:
        return "is cut"
    if hashlib.blake2b(head[:size], digest_size=_DIGEST_BYTES).digest() != head[size:]:
        return "has a damaged header"
    magic, layout, count, nbytes, named = _HEAD.unpack_from(head)
    if (magic, layout, named) != (_MAGIC, LAYOUT, _named(name)) or (count, nbytes) != (pieces, len(into)):
        return "is of another model, type or version"
    sums = struct.unpack_from(f"<{pieces}I", head, _HEAD.size)
    for i, expected in enumerate(sums):
        piece = into[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]
        at = 0
        while at < len(piece):
            if (got := os.readv(handle, [piece[at:]])) == 0:
                return "is cut"
            at += got
        if zlib.crc32(piece) != expected:
            return "has been changed: a checksum differs"
    return "is longer than it should be" if os.read(handle, 1) else None
