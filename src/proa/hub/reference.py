"""Hub references: `org/name@revision:file`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from proa.errors import UsageError

_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^@:\s]+))?(:(?P<file>[^:\s]+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubReference:
    """A repository, its revision (branch, tag or commit), and for GGUF the file's name or quantisation (Q4_K_M)."""

    repo: str
    revision: str = "main"
    file: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")

    @property
    def is_commit(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str | None) -> HubReference:
        """Return this reference at another revision, if one is given. Raises UsageError if it has a different revision
        already."""
        if revision is None or revision == self.revision:
            return self
        if self.revision != "main":
            raise UsageError(
                f"{self} and --revision {revision} give different revisions.", "Give the revision only once."
            )
        return replace(self, revision=revision)


def parse_reference(text: str) -> HubReference | None:
    """Parse a hub reference; None if `text` does not have that form."""
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text:
        return None
    return HubReference(match["repo"], match["revision"] or "main", match["file"])
