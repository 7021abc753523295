"""The identity of a checkpoint, for what is kept from one start to the next. Never: torch, reading all weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from proa.weights.checkpoint import Checkpoint

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the config, of the tensors' headers, of names, sizes and modification times of their files, and of the
    first bytes of up to 256 tensors. A changed checkpoint has another one; so may an equal copy, whose files are newer.

    Random weights (load format "dummy") have no files: their seed and format are options. Raises OSError.
    """
    found = hashlib.blake2b(digest_size=32)
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    found.update(f"{checkpoint.load_format} {checkpoint.dtype} {config}\n".encode())
    tensors = sorted(checkpoint.tensors.items())
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file.name} {tensor.offset}\n".encode())
    for path in sorted({tensor.file for _, tensor in tensors}):
        stat = path.stat()
        found.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for _, tensor in tensors[:: -(-len(tensors) // _SAMPLES) or 1]:
        found.update(_first_bytes(tensor.file, tensor.offset, min(_SAMPLE_BYTES, tensor.nbytes)))
    return found.hexdigest()


def _first_bytes(path: Path, offset: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(count)
