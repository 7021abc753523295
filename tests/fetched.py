"""Wheels and sdists that tests use but that are not dependencies: downloaded by name and checksum, unpacked, and
cached.

They are never installed: a child process gets them on its path. Without a network the test is skipped, with the reason.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

_CACHE = Path(os.environ.get("PROA_TEST_WHEELS") or Path(tempfile.gettempdir()) / f"proa-test-wheels-{os.getuid()}")
_TIMEOUT_S = 240.0
# Python has filters of archives since 3.11.4; Debian 12 has 3.11.2. The files are known by their checksums.
_FILTER: dict[str, Any] = {"filter": "data"} if sys.version_info >= (3, 11, 4) else {}


def unpacked(requirement: str, sha256: str, *, source: bool = False) -> Path:
    """Return a folder with the contents of a pure Python wheel, or of the sdist (`source`), `name==version`. Skips the
    test without a network."""
    folder = _CACHE / f"{requirement.replace('==', '-')}-{sha256[:12]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
                archive = _download(requirement, sha256, Path(scratch), source)
                how = _FILTER if source else {}
                shutil.unpack_archive(archive, Path(scratch) / "unpacked", "gztar" if source else "zip", **how)
                (Path(scratch) / "unpacked").rename(folder)
    return folder


def _download(requirement: str, sha256: str, folder: Path, source: bool) -> Path:
    """Download the file with pip. A wrong checksum fails the test; a missing network skips it."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    # pip builds an sdist's metadata; with :all: it would also build the tools for that from source: a minute more.
    command += [f"--no-binary={requirement.partition('==')[0]}" if source else "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    files = list(folder.glob("*.tar.gz" if source else "*.whl"))
    if done.returncode == 0 and files:
        return files[0]
    if "HASH" in done.stderr.upper():
        pytest.fail(f"{requirement} is not the file that this test was written for: {done.stderr.strip()[-400:]}")
    last = done.stderr.strip().splitlines()
    pytest.skip(f"{requirement} cannot be fetched: {last[-1] if last else 'pip said nothing'}")


def installed(lock: Path) -> Path:
    """Return a folder with the packages of a list, `name==version` a line, which has their dependencies too. Skips the
    test without a network."""
    text = lock.read_bytes()
    folder = _CACHE / f"{lock.stem}-{sys.version_info[0]}{sys.version_info[1]}-{hashlib.sha256(text).hexdigest()[:12]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
                command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--quiet"]
                command += ["--no-input", "--disable-pip-version-check", f"--target={scratch}/packages", f"-r{lock}"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
                if done.returncode:
                    last = done.stderr.strip().splitlines()
                    pytest.skip(f"{lock.stem} cannot be fetched: {last[-1] if last else 'pip said nothing'}")
                (Path(scratch) / "packages").rename(folder)
    return folder


def kept(name: str, made_of: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` fills, which is called only once for what the folder is made of."""
    folder = _CACHE / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
                make(Path(scratch) / "made")
                (Path(scratch) / "made").rename(folder)
    return folder


def npm_package(spec: str, sha512: str) -> Path:
    """Return a folder with the contents of an npm package, `name@version`; sha512: its checksum in base64. Skips the
    test without npm or a network."""
    folder = _CACHE / f"npm-{spec.replace('/', '-').replace('@', '-')}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
                archive = _npm_pack(spec, Path(scratch))
                found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
                if found != sha512:
                    pytest.fail(f"{spec} is not the file that this test was written for: its sha512 is {found}")
                with tarfile.open(archive) as packed:
                    packed.extractall(Path(scratch) / "unpacked", **_FILTER)
                (Path(scratch) / "unpacked").rename(folder)
    return folder / "package"


def _npm_pack(spec: str, folder: Path) -> Path:
    if shutil.which("npm") is None:
        pytest.skip(f"{spec} cannot be fetched: npm is not installed")
    command = ["npm", "pack", "--silent", f"--pack-destination={folder}", spec]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        pytest.skip(f"{spec} cannot be fetched: {done.stderr.strip()[-300:] or 'npm said nothing'}")
    return archives[0]
