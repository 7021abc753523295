"""Events of one request on their way from the engine's messages to the request's task, and the joining of those that
wait together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

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
    held: TokenEvent | None = None
    for event in events:
        if isinstance(event, TokenEvent):
            if held is not None and _continues(held, event):
                held = _join(held, event)
                continue
            if held is not None:
                yield held
            held = event
        else:
            if held is not None:
                yield held
            held = None
            yield event
    if held is not None:
        yield held


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


def _join(first: TokenEvent, event: TokenEvent) -> TokenEvent:
    return msgspec.structs.replace(
        first,
        tokens=first.tokens + event.tokens,
        logprobs=None if first.logprobs is None or event.logprobs is None else first.logprobs + event.logprobs,
        finish=event.finish,
        error=event.error,
        stop_token=event.stop_token,
    )
