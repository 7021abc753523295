"""Measures how fast the CPU multiplies: the peak of the unit that the native kernels use, on registers, with all
workers. Never: which CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from proa.machine.topology import Team
from proa.native.ceilings import peak_rate
from proa.native.pool import Pool
from proa.native.ram import LEAST_WINDOW_S, WINDOWS

_SPIN_US = 50


def measure_products(teams: Sequence[Team], isa: str, *, pinned: bool = True) -> float:
    """Floating-point operations/s of the kernels `isa` on the teams' CPUs: the best of several windows, since other
    programs can only take time away. Takes 0.1 s. Raises NativeError, ResourceError."""
    with ThreadPoolExecutor(1) as thread:  # the pool's caller must be bound to a CPU, but our caller's thread must not
        return thread.submit(_measure, teams, isa, pinned).result()


def _measure(teams: Sequence[Team], isa: str, pinned: bool) -> float:
    own, *others = teams[0].cpus
    if pinned:
        Pool.bind_caller({own})
    with Pool([others, *(team.cpus for team in teams[1:])], isa=isa, pin=pinned, spin_us=_SPIN_US) as pool:
        return max(peak_rate(pool, pool.threads, LEAST_WINDOW_S) for _ in range(WINDOWS))
