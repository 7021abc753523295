"""A model folder with the true headers and no weights, so that the same code that opens a model on disk judges one
that is not fetched yet. Belongs here: making that folder. Never: judging.

The files have their full size but are sparse: what was not fetched is a hole, which takes no space.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proa.errors import WeightsError
from proa.hub.api import Hub
from proa.hub.repository import HubFile, Repository
from proa.weights.gguf_header import BrokenHeader, gguf_index

_SAFETENSORS_FIRST_BYTES = 1 << 18  # holds the header of most shards
_SAFETENSORS_LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit
# A GGUF does not say how long its header is: bytes to try. The first part carries the vocabulary, others do not.
_GGUF_FIRST_BYTES = (8 << 20, 32 << 20, 128 << 20)
_GGUF_OTHER_BYTES = (1 << 20, 8 << 20, 32 << 20)


def preview_safetensors(hub: Hub, repository: Repository, files: Sequence[HubFile], folder: Path) -> None:
    """Raises WeightsError if a file is no safetensors file."""
    for file in files:
        head = hub.read_range(repository, file, _SAFETENSORS_FIRST_BYTES)
        stop = 8 + int.from_bytes(head[:8], "little")
        if stop > min(file.size_bytes, _SAFETENSORS_LONGEST_HEADER_BYTES):
            raise WeightsError(f"{file.path} is not a safetensors file.", "The repository is damaged.")
        if stop > len(head):
            head = hub.read_range(repository, file, stop)
        _write_sparse(folder / file.path, head[:stop], file.size_bytes)


def preview_gguf(hub: Hub, repository: Repository, files: Sequence[HubFile], folder: Path) -> Path:
    """Returns the first part.

    Raises WeightsError if a file is no GGUF or has tensors of a type that cannot be loaded.
    """
    first = folder / files[0].path
    for first_bytes, other_bytes in zip(_GGUF_FIRST_BYTES, _GGUF_OTHER_BYTES, strict=True):
        heads: dict[Path, int] = {}
        for i, file in enumerate(files):
            head = hub.read_range(repository, file, other_bytes if i else first_bytes)
            heads[folder / file.path] = len(head)
            _write_sparse(folder / file.path, head, file.size_bytes)
        try:
            tensors = gguf_index(first).tensors.values()
        except WeightsError as error:
            if isinstance(error.__cause__, BrokenHeader):
                continue  # ran into the hole: a tensor without dimensions
            raise
        data_starts = {file: min(t.offset for t in tensors if t.file == file) for file in {t.file for t in tensors}}
        if all(start <= heads[file] or heads[file] == file.stat().st_size for file, start in data_starts.items()):
            return first
    raise WeightsError(
        f"{files[0].path} of {repository.reference} has no readable header in its first {max(heads.values())} bytes.",
        "The repository is damaged; choose another file.",
    )


def _write_sparse(path: Path, head: bytes, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(head)
        out.truncate(size_bytes)
