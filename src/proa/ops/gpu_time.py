"""Times launches on a GPU by CUDA events. Never: what is launched."""

from __future__ import annotations

from collections.abc import Callable

import torch


def fastest_s(launch: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest of `runs` launches on the current stream, after one that loads the kernels and does not
    count."""
    found: list[float] = []
    for _ in range(1 + runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found[1:])
