"""Collects the items of a step while the scheduler plans it. Never: choosing requests."""

from __future__ import annotations

from proa.engine.scheduling.phases import NextChunk, Phases
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.step_plan import StepItem
from proa.machine.cost.turns import LONG_TOKENS, SHORT_TOKENS


class StepBuilder:
    def __init__(self, budget_tokens: int, phases: Phases, *, apart: bool) -> None:
        """budget_tokens: tokens left for prefill chunks. apart: chunks form a step of their own, which has the whole
        budget."""
        self.budget_tokens = budget_tokens
        self._phases, self._apart = phases, apart
        self._decodes: dict[str, StepItem] = {}
        self._chunks: dict[str, StepItem] = {}
        self._has_short = self._has_long = False
        self.is_closed = False  # a chunk must be alone

    def __len__(self) -> int:
        return len(self._decodes) + len(self._chunks)

    def has(self, request: Request) -> bool:
        return request.id in self._chunks

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def lower_budget(self, num_tokens: int) -> None:
        self.budget_tokens = max(0, self.budget_tokens - num_tokens)

    def add_decode(self, request: Request, cost_tokens: int) -> None:
        self._decodes[request.id] = self._item(request, 1)
        if not self._apart:
            self.budget_tokens -= cost_tokens

    def suits(self, request: Request, prompt_tokens: int, room_tokens: int, *, only_whole: bool) -> bool:
        """True if a prompt with this many tokens to compute may join: in a step of chunks only no short prompt beside a
        long one, whose end it would wait for. only_whole: at most room_tokens, in a step that overtakes another one."""
        if only_whole and prompt_tokens > room_tokens:
            return False
        start = len(request.tokens) - prompt_tokens
        if not self._phases.suits(request, start, room_tokens, beside_chunks=self.has_chunks, overtakes=only_whole):
            return False
        short, long = prompt_tokens <= SHORT_TOKENS, prompt_tokens >= LONG_TOKENS
        return not self._apart or not ((short and self._has_long) or (long and self._has_short))

    def add_chunk(self, request: Request, chunk: NextChunk) -> None:
        self._has_short |= request.num_left <= SHORT_TOKENS
        self._has_long |= request.num_left >= LONG_TOKENS
        self._chunks[request.id] = self._item(request, chunk.num_tokens)
        self.budget_tokens -= chunk.num_tokens + chunk.padding_tokens
        self.is_closed |= chunk.alone

    def remove(self, request: Request) -> None:
        """Drop the items of a request that was preempted after it was added."""
        self._decodes.pop(request.id, None)
        self._chunks.pop(request.id, None)

    def items(self) -> tuple[list[StepItem], list[StepItem]]:
        """Items of the step, decodes first, and of the step beside it, if chunks form one."""
        decodes, chunks = list(self._decodes.values()), list(self._chunks.values())
        return (decodes, chunks) if self._apart else (decodes + chunks, [])

    def _item(self, request: Request, num_tokens: int) -> StepItem:
        samples = num_tokens == request.num_left
        return StepItem(request, request.num_computed, num_tokens, samples, request.copy_from)
