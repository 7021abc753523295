"""Events of one request on their way from the engine's messages to the request's task, and the joining of those that
wait together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from proa.errors import ProaError
from proa.types import TokenEvent

Event = TokenEvent | ProaError


class Mailbox:
    """The events that the request's task has not taken yet. One task takes; put() is called on its event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrival: asyncio.Future[None] | None = None  # awaited by the task while there are no events

    def put(self, event: Event) -> None:
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> list[Event]:
        """Wait for the next event; remove and return all that are there, at least one."""
        while not self._events:
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        events, self._events = self._events, []
        return events


def joined(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events of one request with tokens of neighbouring steps in one event, as if one step had made them."""
    run: list[TokenEvent] = []  # events that become one
    for event in events:
        if isinstance(event, TokenEvent) and run and _continues(run[0], event):
            run.append(event)
            continue
        if run:
            yield _join(run)
        run = [event] if isinstance(event, TokenEvent) else []
        if isinstance(event, ProaError):
            yield event
    if run:
        yield _join(run)


def _continues(first: TokenEvent, event: TokenEvent) -> bool:
    """Whether one event can hold both: neither is progress, and what comes with a first token is in `first` only."""
    return (
        first.progress is None
        and event.progress is None
        and event.prompt_logprobs is None
        and event.cached_tokens is None
        and event.prompt_experts is None
        and (first.logprobs is None) == (event.logprobs is None)
    )


def _join(run: Sequence[TokenEvent]) -> TokenEvent:
    first, last = run[0], run[-1]
    if first is last:
        return first
    logprobs = [event.logprobs for event in run if event.logprobs is not None]
    return msgspec.structs.replace(
        first,
        tokens=list(chain.from_iterable(event.tokens for event in run)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        finish=last.finish,
        error=last.error,
        stop_token=last.stop_token,
    )
