"""A step as planned by the scheduler. Never: choosing requests, tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from proa.engine.scheduling.request import NO_SLOT, Request


class StepItem(msgspec.Struct, frozen=True):
    """Compute tokens[start : start + num_tokens] of `request`; the KV of all earlier tokens is in its pages already.

    `samples`: the item reaches the end of the request's tokens, so the step samples 1..1+lookahead_tokens new ones.
    `copy_from`: state slot that is copied to the request's own before the step. `copy_to`: state slot that the
    request's own is copied to after the step.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    copy_from: int = NO_SLOT
    copy_to: int = NO_SLOT


class StepPlan(msgspec.Struct, frozen=True):
    """One step: decodes first, then prefill chunks. The requests' existing page-table entries do not change until
    commit.

    All `copy_from` copies are made before the step writes anything.
    """

    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


def tokens_by_id(
    items: Iterable[StepItem], sampled: Mapping[str, int | Sequence[int]], most: int
) -> dict[str, Sequence[int]]:
    """The tokens that each item sampled, by its request's id. Raises ValueError unless they are 1 to `most`."""
    results: dict[str, Sequence[int]] = {}
    for request in (item.request for item in items):
        tokens = sampled.get(request.id, ())
        results[request.id] = tokens = (tokens,) if isinstance(tokens, int) else tokens
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"{request!r} got {len(tokens)} tokens, expected 1 to {most}")
    return results
