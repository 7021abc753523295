"""When copies of recurrent states are taken, and where prompts are cut for them: docs/decisions/032. Never: which copy
goes first, tensors.

A copy is taken behind a step that ends where a page does, so that the prefix tree has a node for it. Steps of decode
do so by themselves; a prompt's are cut there.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.cache.pages import IntegrityError
from proa.cache.radix import PrefixCache, PrefixMatch
from proa.engine.scheduling.request import NO_SLOT, Request
from proa.engine.scheduling.step_plan import StepItem


@dataclass(frozen=True)
class CopyRules:
    """every_tokens: from one copy of a sequence to its next. A copy moves as many bytes as the states of one decoded
    token, so this is its cost: 1 in so many.

    cut_tokens: a prompt is cut in two steps where that leaves a copy so far behind the last one. Up to there computing
    them once more beside other tokens takes no longer than the second step does: both read most of the experts.

    asking_tokens: up to so many a template adds to ask for an answer, and may leave out in the next turn (<think>).
    """

    every_tokens: int = 32
    cut_tokens: int = 256
    asking_tokens: int = 4


class Copying:
    """What requests know of their copies (`copied_tokens`, `branch_tokens`, `passing`) is set here alone."""

    def __init__(self, cache: PrefixCache, rules: CopyRules) -> None:
        if cache.copies is None:
            raise ValueError("this prefix tree has no room for copies of states")
        self._copies, self._page_tokens, self._rules = cache.copies, cache.page_tokens, rules

    def admit(self, request: Request, match: PrefixMatch) -> int:
        """`request` starts behind `match`: the slot of the states that it goes on from, if it has any."""
        request.copied_tokens = len(match.pages) * self._page_tokens
        request.branch_tokens = match.num_known * self._page_tokens
        return self._copies.use(match.node) if match.pages else NO_SLOT

    def chunk(self, request: Request, most_tokens: int) -> int:
        """How many of its next tokens, of `most_tokens` that there is room for, a step takes."""
        start, end = request.num_computed, request.num_computed + most_tokens
        for stop in sorted((request.branch_tokens, self._prompt_stop(request))):
            if start < stop < end and stop - request.copied_tokens >= self._rules.cut_tokens:
                return stop - start
        whole = end - end % self._page_tokens
        return whole - start if start < whole and end < len(request.tokens) else most_tokens

    def leads(self, request: Request) -> bool:
        """Is it computing a prompt that will leave a copy behind?"""
        stop = self._prompt_stop(request)
        return request.num_computed < stop and stop - request.copied_tokens >= self._rules.cut_tokens

    def planned(self, item: StepItem) -> StepItem:
        """The item with a slot to copy into, if there is to be a copy behind it."""
        request, end = item.request, item.start + item.num_tokens
        if end % self._page_tokens or end - request.copied_tokens < self._rules.every_tokens:
            return item
        if end >= request.max_length:  # a step ahead of its last one
            return item
        slot = self._copies.take()
        if slot is None:
            return item
        request.copied_tokens = end
        return msgspec.structs.replace(item, copy_to=slot)

    def keep(self, item: StepItem) -> None:
        """The item is computed, its pages are in the tree."""
        if item.copy_to == NO_SLOT:
            return
        request, end = item.request, item.start + item.num_tokens
        if request.node is None or request.node.depth * self._page_tokens != end:
            raise IntegrityError(f"{request!r} has no node of the prefix tree for its states behind {end} tokens")
        self._copies.keep(request.node, item.copy_to)
        if request.passing is not None:
            self._copies.pass_by(request.passing)
        ends = (request.branch_tokens, self._prompt_stop(request))
        request.passing = None if end in ends else request.node

    def forget(self, item: StepItem) -> None:
        """Nobody wants what the item computes."""
        if item.copy_to != NO_SLOT:
            self._copies.give_back(item.copy_to)

    def check(self, items: list[StepItem]) -> None:
        """items: of all steps in flight. Raises IntegrityError."""
        self._copies.check([item.copy_to for item in items if item.copy_to != NO_SLOT])

    def _prompt_stop(self, request: Request) -> int:
        stop = max(0, request.num_prompt - self._rules.asking_tokens)
        return stop - stop % self._page_tokens
