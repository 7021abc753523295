"""What a repository on the hub holds: plain data. Never: the network, which files are wanted."""

from __future__ import annotations

from dataclasses import dataclass

from proa.hub.reference import HubReference


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. sha256: of large files; the others have git's blob id alone, which names either."""

    path: str
    size_bytes: int
    blob_id: str
    sha256: str | None

    @property
    def etag(self) -> str:
        """The name of the content in the cache."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    reference: HubReference
    commit: str
    files: tuple[HubFile, ...]
