"""An engine's CPU workers and the packed weight memory that they fill and read. Never: their number, their programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields

from proa.engine.executors.crew import Crew
from proa.engine.ipc import Ready
from proa.machine.claims import CpuClaim
from proa.machine.topology import UNBOUND
from proa.machine.usage import peak_rss_bytes
from proa.native.pool import Pool
from proa.ops.packed import Memory
from proa.ops.table import Ops
from proa.plan.plan import Workers
from proa.types import Decision


class CpuSide:
    """Pool, crew and memory as planned. The pool's calling thread counts as the first worker of the first team."""

    def __init__(self, workers: Workers, isa: str) -> None:
        self._workers = workers
        first, *others = [team.cpus for team in workers.teams]
        self.caller_cpus = () if workers.binding == "none" else workers.homes[0] if workers.homes else first[:1]
        self.pool = Pool(
            [first[1:], *others],
            isa=isa,
            pin=workers.binding != "none",
            homes=workers.homes,
            spin_us=workers.spin_us,
            nice=workers.nice,
        )
        self.decisions: list[Decision] = []
        claim = self._claim() if workers.binding == "core" else None
        self.crew = Crew(self.pool, workers.trials[0], claim)
        nodes = [None if team.node == UNBOUND else team.node for team in workers.teams]
        self.memory = Memory(self.pool, nodes, workers.interleave)

    def bind_caller(self) -> None:
        """Bind the calling thread, from now on the pool's caller, to its CPUs: unbound, it may be scheduled onto a
        worker's."""
        if self.caller_cpus:
            os.sched_setaffinity(0, self.caller_cpus)

    def note_unbound(self) -> None:
        """Add a decision if some weights are not on their planned memory node."""
        if why := self.memory.unbound():
            self.decisions.append(Decision("NUMA memory", "bind", "unbound", why))

    def ready(
        self, load_seconds: float, ops: str, vram_bytes: int = 0, decisions: Sequence[Decision] = ()
    ) -> Ready:  # fmt: skip
        """The Ready message. ops: what computes the model's ops. vram_bytes: of weights on a GPU. decisions: those that
        follow the workers' own."""
        formats = dict(self.memory.bytes_by_format)
        return Ready(
            load_seconds=load_seconds,
            weights_bytes=sum(formats.values()) + vram_bytes,
            ops={field.name: ops for field in fields(Ops)},
            decode_threads=sum(self.crew.few),
            prefill_threads=sum(self.crew.many),
            peak_rss_bytes=peak_rss_bytes(),
            formats=formats,
            pages=self.memory.pages(),
            decisions=(*self.decisions, *decisions),
        )

    def _claim(self) -> CpuClaim | None:
        try:
            return CpuClaim([cpu for team in self._workers.teams for cpu in team.cpus])
        except OSError as error:
            why = f"other engines cannot see which CPUs are taken: {error.strerror}"
            self.decisions.append(Decision("CPU binding", "core", "core", why))
            return None
