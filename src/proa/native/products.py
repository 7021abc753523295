"""Measures how fast the CPU multiplies: the peak of the unit that the native kernels use, on registers, with all
workers. Never: which CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from proa.machine.topology import Team
from proa.native.ceilings import peak_rate
from proa.native.pool import Pool, with_pool
from proa.native.ram import LEAST_WINDOW_S, WINDOWS


def measure_products(teams: Sequence[Team], isa: str, *, pinned: bool = True) -> float:
    """Floating-point operations/s of the kernels `isa` on the teams' CPUs: the best of several windows, since other
    programs can only take time away. Takes 0.1 s. Raises NativeError, ResourceError."""

    def peak(pool: Pool) -> float:
        return max(peak_rate(pool, pool.threads, LEAST_WINDOW_S) for _ in range(WINDOWS))

    return with_pool(teams, peak, isa=isa, pinned=pinned)
