"""Whether the demo's checkpoint is there already. Never: making it (assemble.py), NumPy, which takes long to import."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from proa.errors import UsageError

VERSION = 1  # raise it when the folder's contents change
TOP_K, DTYPE = 12, "bfloat16"
STAMP_NAME = "proa_demo.json"


def split_bytes() -> bytes:
    """Of split.npz."""
    return files("proa.demo").joinpath("split.npz").read_bytes()


def stamp_of(gguf: Path, top_k: int = TOP_K, dtype: str = DTYPE) -> dict[str, Any]:
    """What a folder is made from."""
    split = hashlib.sha256(split_bytes()).hexdigest()
    return {"version": VERSION, "split": split, "gguf": gguf.name, "top_k": top_k, "dtype": dtype}


def is_made(folder: Path, stamp: dict[str, Any]) -> bool:
    """Whether the folder was made by these very inputs. Raises UsageError rather than replace what is not ours."""
    stamp_path = folder / STAMP_NAME
    if stamp_path.is_file():
        return bool(json.loads(stamp_path.read_text()) == stamp)
    if folder.exists():
        raise UsageError(
            f"{folder} exists and was not made by Proa's demo.", "Name another folder, or delete this one."
        )
    return False
