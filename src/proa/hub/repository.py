"""The files of a hub repository, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from proa.hub.reference import HubReference


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. sha256: only of large (LFS) files; other files have only git's blob id. xet_hash: the key
    of a file in the hub's Xet store, for other programs."""

    path: str
    size_bytes: int
    blob_id: str
    sha256: str | None
    xet_hash: str | None = None

    @property
    def etag(self) -> str:
        """Name of the file's content in the cache."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    reference: HubReference
    commit: str
    files: tuple[HubFile, ...]
