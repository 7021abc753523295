"""Placeholders in place of a model's file: empty files and Git LFS pointers. Never: the content of real files."""

from __future__ import annotations

import re
from pathlib import Path

from proa.errors import WeightsError

_LFS = b"version https://git-lfs.github.com/spec/v1"
_LONGEST_POINTER_BYTES = 1024  # the specification's limit
_SIZE = re.compile(rb"^size (\d+)$", re.MULTILINE)


def placeholder(file: Path) -> tuple[str, str] | None:
    """(problem, remedy) if `file` is a placeholder; None for anything else, readable or not."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(_LONGEST_POINTER_BYTES) if size <= _LONGEST_POINTER_BYTES else b""
    except OSError:
        return None
    if not size:
        return f"{file} is empty (0 bytes).", "The download failed or was not finished: fetch the file again."
    if not head.startswith(_LFS):
        return None
    real = _SIZE.search(head)
    what = f"the real file, of {int(real[1])} bytes," if real else "the real file"
    return (
        f"{file} is a Git LFS pointer: {what} was not downloaded.",
        f"Run `git lfs pull` in {file.parent}, or download the model again with `hf download`.",
    )


def refuse_placeholder(file: Path) -> None:
    """Raise WeightsError for a weight file that is a placeholder."""
    if found := placeholder(file):
        raise WeightsError(*found)
