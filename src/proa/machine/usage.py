"""What this process has used of the machine. Never: what there is of it (probe.py)."""

from __future__ import annotations

import resource


def peak_rss_bytes() -> int:
    """The most RAM that was ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
