"""When recurrent states are copied for the prefix cache, and where prompts are cut for that: docs/decisions/032. Never:
which copy is evicted, tensors.

A copy is taken after a step that ends at a page boundary, because copies belong to nodes of the prefix tree, which hold
whole pages. Decode reaches every boundary; prefill chunks are cut there.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.cache.pages import IntegrityError
from proa.cache.radix import PrefixCache, PrefixMatch
from proa.engine.scheduling.request import NO_SLOT, Request
from proa.engine.scheduling.restoring import Behind
from proa.engine.scheduling.step_plan import StepItem


@dataclass(frozen=True)
class CopyRules:
    """every_tokens: least distance between two copies of a sequence. A copy moves as many bytes as the states of one
    decoded token, so it adds at most 1 / every_tokens to their traffic.

    cut_tokens: a prefill chunk is cut only if the copy there lies at least this far behind the sequence's last one. For
    fewer tokens, computing them again beside others takes no longer than the additional step: both read most of the
    experts.

    asking_tokens: the most tokens of a generation prompt that the chat template omits from the next turn (<think>). The
    copy at a prompt's end is taken before them.
    """

    every_tokens: int = 32
    cut_tokens: int = 256
    asking_tokens: int = 4


class Copying:
    """Applies CopyRules. Only this class and Request itself set `copied_tokens`, `branch_tokens`, `copy_from` and
    `passing`. Offers those copies to the tiers that later prompts can continue from: at a branch, at a prompt's end,
    and the last one of a request."""

    def __init__(self, cache: PrefixCache, rules: CopyRules, behind: Behind, least_tokens: int) -> None:
        """least_tokens: of a prompt's last chunk. The copy at a prompt's end is taken before them too, since the same
        prompt could not continue from a later one."""
        if cache.copies is None:
            raise ValueError("this prefix cache keeps no copies of states: make it with StateCopies")
        self._copies, self._page_tokens, self._rules, self._behind = cache.copies, cache.page_tokens, rules, behind
        self._end_tokens = max(rules.asking_tokens, least_tokens)

    def admit(self, request: Request, match: PrefixMatch) -> None:
        """Have `request` continue from `match`."""
        request.copied_tokens = len(match.pages) * self._page_tokens
        request.branch_tokens = match.known.depth * self._page_tokens
        if match.pages:
            request.copy_from = self._copies.use(match.node)
            self._behind.resumed(request, match.node)

    def chunk(self, request: Request, most_tokens: int) -> int:
        """Number of prompt tokens, at most `most_tokens`, in the request's next step: it ends at a branch, before the
        template's last tokens or at a page boundary if a copy is to be taken there."""
        start, end = request.num_computed, request.num_computed + most_tokens
        for stop in sorted((request.branch_tokens, self._prompt_stop(request))):
            if start < stop < end and stop - request.copied_tokens >= self._rules.cut_tokens:
                return stop - start
        whole = end - end % self._page_tokens
        return whole - start if start < whole and end < len(request.tokens) else most_tokens

    def leads(self, request: Request) -> bool:
        """Whether siblings should wait for the copy that will be taken at the end of the prompt being computed."""
        stop = self._prompt_stop(request)
        return request.num_computed < stop and stop - request.copied_tokens >= self._rules.cut_tokens

    def planned(self, item: StepItem) -> StepItem:
        """Return the item, with `copy_to` set if its states are to be copied after the step and a slot can be had."""
        request, end = item.request, item.start + item.num_tokens
        if end % self._page_tokens or end - request.copied_tokens < self._rules.every_tokens:
            return item
        if end >= request.max_length:  # planned ahead: the request ends before this item counts
            return item
        slot = self._copies.take()
        if slot is None:
            return item
        request.copied_tokens = end
        return msgspec.structs.replace(item, copy_to=slot)

    def keep(self, item: StepItem) -> None:
        """Register the copy of a computed item, whose full pages are in the prefix tree."""
        request, end = item.request, item.start + item.num_tokens
        request.copy_from = NO_SLOT
        if item.copy_to == NO_SLOT:
            return
        if request.node is None or request.node.depth * self._page_tokens != end:
            raise IntegrityError(f"{request!r} has no prefix tree node that ends at token {end}, where it was copied")
        self._copies.keep(request.node, item.copy_to)
        if request.passing is not None:
            self._copies.pass_by(request.passing)
        stays = end in (request.branch_tokens, self._prompt_stop(request))
        request.passing = None if stays else request.node
        if stays:
            self._behind.copied(request, request.node)

    def forget(self, item: StepItem) -> None:
        """Free the slot of an item whose results are discarded."""
        if item.copy_to != NO_SLOT:
            self._copies.give_back(item.copy_to)

    def end(self, request: Request) -> None:
        """Offer the last copy of a request that ends: short messages and answers leave no other."""
        if request.passing is not None:
            self._behind.copied(request, request.passing)

    def check(self, items: list[StepItem]) -> None:
        """Raise IntegrityError unless every slot is accounted for. items: those of all steps in flight."""
        reserved = [item.copy_to for item in items if item.copy_to != NO_SLOT]
        self._copies.check([*reserved, *self._behind.held_slots()])

    def _prompt_stop(self, request: Request) -> int:
        """The last page boundary of the prompt before its last `_end_tokens` tokens."""
        stop = max(0, request.num_prompt - self._end_tokens)
        return stop - stop % self._page_tokens


def copying(cache: PrefixCache | None, rules: CopyRules, behind: Behind, least_tokens: int) -> Copying | None:
    """The rules for a cache with copies of states; None without copies. behind: the tiers that are offered copies."""
    return Copying(cache, rules, behind, least_tokens) if cache is not None and cache.copies is not None else None
