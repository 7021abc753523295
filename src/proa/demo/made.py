"""Checks if the demo checkpoint is built and current. Never: importing NumPy, which is slow (assemble.py builds)."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from proa.errors import UsageError

VERSION = 1  # increment it when the folder's contents change
TOP_K, DTYPE = 12, "bfloat16"
STAMP_NAME = "proa_demo.json"


def split_bytes() -> bytes:
    """Return the contents of split.npz."""
    return files("proa.demo").joinpath("split.npz").read_bytes()


def stamp_of(gguf: Path, top_k: int = TOP_K, dtype: str = DTYPE) -> dict[str, Any]:
    """Return the stamp that identifies a folder's inputs, to be stored in STAMP_NAME."""
    split = hashlib.sha256(split_bytes()).hexdigest()
    return {"version": VERSION, "split": split, "gguf": gguf.name, "top_k": top_k, "dtype": dtype}


def is_made(folder: Path, stamp: dict[str, Any]) -> bool:
    """Return True if the folder was built from the inputs of `stamp`. Raises UsageError if it exists without a stamp:
    then it is not Proa's and must not be replaced."""
    stamp_path = folder / STAMP_NAME
    if stamp_path.is_file():
        return bool(json.loads(stamp_path.read_text()) == stamp)
    if folder.exists():
        raise UsageError(
            f"{folder} exists, but was not made by Proa's demo.", "Give another folder, or delete this one."
        )
    return False
