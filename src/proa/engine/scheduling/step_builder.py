"""Collects the items of a step while the scheduler plans it. Never: choosing requests."""

from __future__ import annotations

from proa.engine.scheduling.request import NO_SLOT, Request
from proa.engine.scheduling.step_plan import StepItem


class StepBuilder:
    def __init__(self, budget_tokens: int, *, apart: bool, always: bool = False) -> None:
        """budget_tokens: tokens left for prefill chunks. apart: while any request decodes, chunks form a step of their
        own, which has the whole budget. always: also while none decodes."""
        self.budget_tokens = budget_tokens
        self.copy_from: dict[str, int] = {}  # id of a request admitted here -> slot of the states it starts from
        self._apart, self._always = apart, always
        self._decodes: dict[str, StepItem] = {}
        self._chunks: dict[str, StepItem] = {}

    def __len__(self) -> int:
        return len(self._decodes) + len(self._chunks)

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def lower_budget(self, num_tokens: int) -> None:
        self.budget_tokens = max(0, self.budget_tokens - num_tokens)

    def add_decode(self, request: Request, cost_tokens: int) -> None:
        self._decodes[request.id] = self._item(request, 1)
        if not self._apart:
            self.budget_tokens -= cost_tokens

    def add_chunk(self, request: Request, num_tokens: int) -> None:
        self._chunks[request.id] = self._item(request, num_tokens)
        self.budget_tokens -= num_tokens

    def remove(self, request: Request) -> None:
        """Drop the items of a request that was preempted after it was added."""
        self._decodes.pop(request.id, None)
        self._chunks.pop(request.id, None)

    def items(self) -> tuple[list[StepItem], list[StepItem]]:
        """Items of the step, decodes first, and of the step beside it, if chunks form one."""
        decodes, chunks = list(self._decodes.values()), list(self._chunks.values())
        beside = self._apart and (decodes or self._always)
        return (decodes, chunks) if beside else (decodes + chunks, [])

    def _item(self, request: Request, num_tokens: int) -> StepItem:
        samples = num_tokens == request.num_left
        copy_from = self.copy_from.get(request.id, NO_SLOT)
        return StepItem(request, request.num_computed, num_tokens, samples, copy_from)
