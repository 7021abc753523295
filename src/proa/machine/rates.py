"""The result of a RAM bandwidth measurement (native/ram.py measures)."""

from __future__ import annotations

import msgspec

from proa.machine.load import Load


class RamRate(msgspec.Struct, frozen=True, kw_only=True):
    """RAM read bandwidth: the maximum of several short measurements, because other programs can only lower it."""

    bytes_per_s: float
    threads: int  # the fastest of the thread counts tried
    pages: tuple[str, ...]  # page types of the memory: see ArenaInfo
    load: Load  # of other programs during the measurement

    @property
    def source(self) -> str:
        """Describe how it was measured, and if other programs disturbed the measurement."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        pages = "small pages (huge pages were not available)" if "small" in self.pages else "huge pages"
        if self.load.busy:
            disturbed = f"the machine is busy: {self.load}, so RAM may be faster than measured"
            return f"{disturbed}; read by {threads} from {pages}"
        return f"read by {threads} from {pages}" + ("" if self.load.others is not None else f"; {self.load}")
