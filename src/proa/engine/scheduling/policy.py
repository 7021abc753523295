"""Limits, the order of service, and the refusal of requests on submission, all without side effects. Never: pages,
steps, clocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from proa.engine.scheduling.request import Request, State
from proa.engine.scheduling.step_plan import StepItem
from proa.errors import ContextLengthExceeded, QueueFull, RequestError, ResourceError
from proa.plan.plan import Plan
from proa.types import EngineRequest

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The plan's limits.

    lookahead_tokens: drafts per sequence and step, that is tokens beyond the first one; their pages are reserved and
    they count as tokens of the step. pass_tokens: prefill tokens that pass through the layers together, in a step of
    their own; 0: max_batch_tokens limits prefill chunks too. shared_tokens: tokens of a step with decode and prefill
    chunks, since decode waits for all of it; 0: max_batch_tokens.
    """

    context_tokens: int
    page_tokens: int
    max_running: int
    max_batch_tokens: int
    max_queued: int
    max_queued_tokens: int
    lookahead_tokens: int = 0
    pass_tokens: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.context_tokens, self.page_tokens, self.num_slots) < 1:
            raise ValueError(f"no request can run under these limits, at least one of which is too small: {self}")

    @classmethod
    def of(cls, plan: Plan) -> Limits:
        return cls(
            context_tokens=plan.context_tokens,
            page_tokens=plan.page_tokens,
            max_running=plan.max_running,
            max_batch_tokens=plan.max_batch_tokens,
            max_queued=plan.max_queued,
            max_queued_tokens=plan.max_queued_tokens,
            pass_tokens=plan.pass_tokens,
            shared_tokens=plan.shared_tokens,
        )

    @property
    def num_slots(self) -> int:
        """The most requests that run together, so that each can advance in every step."""
        return min(self.max_running, self.max_batch_tokens // (1 + self.lookahead_tokens))

    def prefill_tokens(self, most_tokens: int | None, *, turns: bool) -> int:
        """Most prefill tokens of a step. most_tokens: a further limit, with turns."""
        if not turns:
            return self.max_batch_tokens
        limit = self.pass_tokens or self.max_batch_tokens
        return limit if most_tokens is None else min(limit, most_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


class Lineup:
    """Requests in the order of service, each at most once."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a snapshot: the lineup may be changed during the iteration."""
        return iter(self._requests.copy())

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def last_but(self, ids: Collection[str]) -> Request:
        """The last request whose id is not in `ids`. There must be one."""
        return next(request for request in reversed(self._requests) if request.id not in ids)

    def alternating(self, last: int) -> list[Request]:
        """In the order of service, but of equal priority first those that arrived after the one with arrival `last`."""
        return sorted(self._requests, key=lambda r: (r.priority, r.arrival <= last, r.arrival))

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order, key=lambda r: r.order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request!r} is not in this lineup")
        del self._requests[index]


def goes_on(items: Sequence[StepItem], running: Lineup, first: Request | None, limits: Limits) -> bool:
    """Whether the step after the one with these items is certain to compute one more token of each of them and nothing
    else. first: the waiting request that is admitted next."""
    num_running = sum(request.state is State.RUNNING for request in running)
    if limits.lookahead_tokens or len(items) != num_running:
        return False
    num_going_on = sum(len(item.request.tokens) + 1 < item.request.max_length for item in items)
    full = num_going_on >= limits.num_slots
    if first is not None and not (full and first.priority >= running.last.priority):
        return False
    return num_going_on > 0 and all(item.samples and item.num_tokens == 1 for item in items)


def refuse_impossible(request: EngineRequest, limits: Limits, num_pages: int) -> None:
    """Raise if `request` could never be served, however long it waits.

    RequestError: the prompt is empty, or has numbers that are no token ids. ContextLengthExceeded: prompt plus answer
    are longer than the context. ResourceError: they need more KV pages than exist.
    """
    prompt, answer = len(request.tokens), request.sampling.max_tokens
    if not prompt:
        raise RequestError("The prompt has no tokens.", "Send at least one.", param="prompt")
    if answer < 1:
        raise RequestError(f"max_tokens is {answer}, but must be at least 1.", "Raise max_tokens.", param="max_tokens")
    if min(request.tokens) < 0 or max(request.tokens) > _MAX_TOKEN:
        raise RequestError("The prompt has a number that cannot be a token id.", f"Use ids from 0 to {_MAX_TOKEN}.")
    if prompt + answer > limits.context_tokens:
        raise ContextLengthExceeded(
            f"The prompt has {prompt} tokens and asks for up to {answer} more, "
            f"{prompt + answer} together; the context is {limits.context_tokens}.",
            "Shorten the prompt, lower max_tokens, or start Proa with a larger --context.",
            param="prompt" if prompt >= limits.context_tokens else "max_tokens",
        )
    need = limits.pages_for(prompt + answer - 1 + limits.lookahead_tokens)  # the last token's KV is never needed
    if need > num_pages:
        raise ResourceError(
            f"The prompt's {prompt} tokens and up to {answer} more need {need} KV pages of {limits.page_tokens} "
            f"tokens; there are {num_pages}.",
            "Shorten the prompt, lower max_tokens, or start Proa with a larger --kv-memory.",
            param="max_tokens",
        )


def refuse_crowd(request: EngineRequest, limits: Limits, waiting: Lineup, num_running: int) -> None:
    """Raise QueueFull if too many requests or tokens are waiting already.

    Requests that the next step admits to a free slot do not count as queued, so max_queued 0 means "run at once or not
    at all". A prompt longer than max_queued_tokens may wait if no other request does.
    """
    free_slots = max(0, limits.num_slots - num_running)
    if len(waiting) >= limits.max_queued + free_slots:
        raise QueueFull(
            f"{num_running} requests are running and {len(waiting)} are waiting; at most {limits.max_queued} may wait.",
            "Try again later, or start Proa with a larger --max-running or --max-queued.",
        )
    queued_tokens = sum(len(r.tokens) for r in waiting)
    if queued_tokens and queued_tokens + len(request.tokens) > limits.max_queued_tokens:
        raise QueueFull(
            f"Requests with {queued_tokens} tokens are waiting; this one's {len(request.tokens)} would exceed "
            f"the limit of {limits.max_queued_tokens}.",
            "Try again later, or start Proa with a larger --max-queued-tokens.",
        )
