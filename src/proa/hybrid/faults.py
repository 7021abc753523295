"""Rows of a step whose values became infinite or no numbers, and where: noted by the device, read when there is reason
to. Never: what is done about it.
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
    layer: int  # counting layers with experts
    source: str  # "expert 5 on the GPU"


class FaultRecords:
    """Room for steps of `rows` rows that go to `top_k` experts each, and for one more that others run between."""

    def __init__(self, rows: int, top_k: int, device: torch.device) -> None:
        self._of_steps, self._of_parts = torch.zeros(2, rows, IDS + top_k, dtype=torch.int32, device=device)
        self._notes = Notes(self._of_steps)

    def of(self, layer: int) -> LayerFaults:
        """For the device's part of the layer with this number."""
        return LayerFaults(self._notes, layer)

    @contextmanager
    def of_parts(self) -> Iterator[None]:
        """What is launched and taken meanwhile is of a step in parts. Nothing that is captured meanwhile may stay."""
        self._notes.records = self._of_parts
        try:
            yield
        finally:
            self._notes.records = self._of_steps

    def take(self, rows: int) -> list[Fault]:
        """Of the first `rows` rows; all records are empty afterwards. Waits for the current stream."""
        records = self._notes.records[:rows]
        found = records[:, LAYER].nonzero().flatten().tolist()
        if not found:
            return []
        faults = [
            Fault(row, record[LAYER] - 1, _source(record))
            for row, record in zip(found, records[found].tolist(), strict=True)
        ]
        self._notes.records.zero_()
        return faults


def _source(record: list[int]) -> str:
    sources, own, ids = record[SOURCES], record[OWN], record[IDS:]
    if sources & INPUT:
        return "what comes before its experts"
    theirs = [e for k, e in enumerate(ids) if e >= 0 and not own >> k & 1]
    parts = [_experts([e for k, e in enumerate(ids) if sources >> k & 1], "on the GPU")]
    parts.append(_experts(theirs, "on the CPU") if sources & CPU else "")
    parts.append("the shared expert" if sources & SHARED else "")
    return " and ".join(filter(None, parts)) or f"the sum of {_experts([e for e in ids if e >= 0], 'together')}"


def _experts(ids: list[int], where: str) -> str:
    return f"expert{'s' * (len(ids) > 1)} {', '.join(map(str, ids))} {where}" if ids else ""
