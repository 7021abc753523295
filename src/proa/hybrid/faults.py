"""Fault records: rows of a step that became non-finite (NaN or Inf), and in which layer. The device writes them; the
host reads them on demand, since reading waits. Never: reacting to faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from proa.ops.faults import CPU, IDS, INPUT, LAYER, OWN, SHARED, SOURCES, LayerFaults, Notes


@dataclass(frozen=True)
class Fault:
    row: int  # of the step
    layer: int  # counts MoE layers only
    source: str  # "expert 5 on the GPU"


class FaultRecords:
    """Records for steps of up to `rows` rows with `top_k` experts each, and a second set for a step in parts of up to
    `rows_in_parts` rows, since other steps run between its parts. defers: decode steps defer experts."""

    def __init__(
        self, rows: int, rows_in_parts: int, top_k: int, device: torch.device, *, defers: bool = False
    ) -> None:  # fmt: skip
        self._defers = defers
        self._of_steps = torch.zeros(rows, IDS + top_k, dtype=torch.int32, device=device)
        self._of_parts = torch.zeros(rows_in_parts, IDS + top_k, dtype=torch.int32, device=device)
        self._notes = Notes(self._of_steps)

    def of(self, layer: int) -> LayerFaults:
        """Return the records as the MoE layer with this number writes them."""
        return LayerFaults(self._notes, layer)

    @contextmanager
    def of_parts(self, first_row: int) -> Iterator[None]:
        """Within the context, launches and `take` use the records of the step in parts, launches from `first_row` on.
        A graph captured within it must not outlive it."""
        self._notes.records = self._of_parts[first_row:]
        try:
            yield
        finally:
            self._notes.records = self._of_steps

    def take(self, rows: int) -> list[Fault]:
        """Return the faults of the first `rows` rows and clear all records. Waits for the current stream."""
        records = self._notes.records[:rows]
        found = records[:, LAYER].nonzero().flatten().tolist()
        if not found:
            return []
        faults = [
            Fault(row, record[LAYER] - 1, _source(record, self._defers))
            for row, record in zip(found, records[found].tolist(), strict=True)
        ]
        self._notes.records.zero_()
        return faults


def _source(record: list[int], defers: bool) -> str:
    """defers: the CPU's sum may have experts of the MoE layer before."""
    sources, own, ids = record[SOURCES], record[OWN], record[IDS:]
    if sources & INPUT:
        return "the input of its experts"
    on_cpu = [e for k, e in enumerate(ids) if e >= 0 and not own >> k & 1]
    parts = [_experts([e for k, e in enumerate(ids) if sources >> k & 1], "on the GPU")]
    of_cpu = [_experts(on_cpu, "on the CPU"), "experts that the MoE layer before deferred" if defers else ""]
    parts.append(" or ".join(filter(None, of_cpu)) if sources & CPU else "")
    parts.append("the shared expert" if sources & SHARED else "")
    return " and ".join(filter(None, parts)) or f"the sum of {_experts([e for e in ids if e >= 0], 'together')}"


def _experts(ids: list[int], where: str) -> str:
    return f"expert{'s' * (len(ids) > 1)} {', '.join(map(str, ids))} {where}" if ids else ""
