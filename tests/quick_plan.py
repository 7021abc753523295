"""Plans without measuring RAM, which takes 0.3 s of all cores. Never: tests."""

from __future__ import annotations

from functools import partial

import proa.plan.prepare
from proa.machine.load import Load
from proa.machine.rates import RamRate

RAM_BYTES_PER_S = 40e9


def ram_of(bytes_per_s: float = RAM_BYTES_PER_S, others: float | None = 0.0, cpus: int = 2) -> RamRate:
    """As if measured, beside other programs that keep `others` of so many CPUs busy."""
    return RamRate(bytes_per_s=bytes_per_s, threads=cpus, pages=("anon-huge",), load=Load(others, cpus))


prepare = partial(proa.plan.prepare.prepare, measure=lambda asked, machine: ram_of())
