"""How fast this machine's RAM was read. Never: reading it (native/ram.py)."""

from __future__ import annotations

import msgspec

from proa.machine.load import Load


class RamRate(msgspec.Struct, frozen=True, kw_only=True):
    """The best of several short measurements: other programs can only take bandwidth away."""

    bytes_per_s: float
    threads: int  # of those numbers of threads that were tried, the fastest
    pages: tuple[str, ...]  # what the memory lay on: see ArenaInfo
    load: Load  # of other programs meanwhile

    @property
    def source(self) -> str:
        """By what it was read, and whether other programs disturbed that."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        pages = "small pages: the kernel gave no huge ones" if "small" in self.pages else "huge pages"
        if self.load.busy:
            disturbed = f"the machine is busy: {self.load}, so that RAM may be faster than this"
            return f"{disturbed}; read by {threads} from {pages}"
        return f"read by {threads} from {pages}" + ("" if self.load.others is not None else f"; {self.load}")
