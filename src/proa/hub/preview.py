"""Builds a preview of a hub model: its weight files with real headers and no data, so that the code that opens a model
on disk can check it before the download.

The files are sparse: they have their full size, but the missing data takes no disk space.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proa.errors import WeightsError
from proa.hub.api import Hub
from proa.hub.repository import HubFile, Repository
from proa.weights.gguf_header import BrokenHeader, gguf_index

_SAFETENSORS_FIRST_BYTES = 1 << 18  # enough for the header of most shards
_SAFETENSORS_LONGEST_HEADER_BYTES = 100_000_000  # the format's limit
# GGUF does not store its header's length: byte counts to try in turn. Only the first part contains the vocabulary.
_GGUF_FIRST_BYTES = (8 << 20, 32 << 20, 128 << 20)
_GGUF_OTHER_BYTES = (1 << 20, 8 << 20, 32 << 20)


def preview_safetensors(hub: Hub, repository: Repository, files: Sequence[HubFile], folder: Path) -> None:
    """Write the previews of safetensors files into `folder`. Raises WeightsError if a file is not safetensors."""
    for file in files:
        head = hub.read_range(repository, file, _SAFETENSORS_FIRST_BYTES)
        stop = 8 + int.from_bytes(head[:8], "little")
        if stop > min(file.size_bytes, _SAFETENSORS_LONGEST_HEADER_BYTES):
            raise WeightsError(
                f"{file.path} of {repository.reference} is not a safetensors file.",
                "The repository is damaged: use another revision.",
            )
        if stop > len(head):
            head = hub.read_range(repository, file, stop)
        _write_sparse(folder / file.path, head[:stop], file.size_bytes)


def preview_gguf(hub: Hub, repository: Repository, files: Sequence[HubFile], folder: Path) -> Path:
    """Write the previews of a GGUF model's files into `folder`; return the first file.

    Raises WeightsError if a file is not GGUF, or has tensors of an unsupported type.
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
                continue  # the header is longer than what was read: read more
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
