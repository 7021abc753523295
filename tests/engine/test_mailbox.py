"""Events of a request that wait for its task: their order, and the joining of neighbouring steps."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.engine.processes.mailbox import Event, Mailbox, joined
from proa.errors import EngineDead
from proa.types import Progress, PromptExperts, TokenEvent, TokenLogprob

FIRST = {"cached_tokens": 3, "prompt_experts": PromptExperts(1, 2), "prompt_logprobs": [None]}


@st.composite
def runs(draw: st.DrawFn) -> list[TokenEvent]:
    """The events of one request as an engine sends them: progress, the first token's, one for each step, the end."""
    scored = draw(st.booleans())

    def logprobs(tokens: list[int]) -> list[TokenLogprob] | None:
        return [TokenLogprob(token, -1.0) for token in tokens] if scored else None

    steps = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12))
    events = [TokenEvent(id="r", progress=Progress(0, done)) for done in range(draw(st.integers(0, 3)))]
    events += [TokenEvent(id="r", tokens=tokens, logprobs=logprobs(tokens)) for tokens in steps]
    first = len(events) - len(steps)
    events[first] = msgspec.structs.replace(events[first], **FIRST)
    end: dict[str, Any] = draw(st.sampled_from([{}, {"finish": "length"}, {"finish": "stop", "stop_token": 7}]))
    events[-1] = msgspec.structs.replace(events[-1], **end)
    return events


@given(runs())
@settings(max_examples=examples(200), deadline=None)
def test_joined_events_say_what_the_separate_ones_said(events: list[TokenEvent]) -> None:
    got = [event for event in joined(events) if isinstance(event, TokenEvent)]
    assert [e.progress for e in got if e.progress] == [e.progress for e in events if e.progress]
    assert [token for e in got for token in e.tokens] == [token for e in events for token in e.tokens]
    scores = [[score for e in some for score in e.logprobs or ()] for some in (got, events)]
    assert scores[0] == scores[1]
    assert all(e.logprobs is None or len(e.logprobs) == len(e.tokens) for e in got)
    with_tokens = [e for e in got if e.progress is None]
    assert len(with_tokens) == 1
    only = with_tokens[0]
    assert (only.cached_tokens, only.prompt_experts, only.prompt_logprobs) == tuple(FIRST.values())
    assert (only.finish, only.stop_token) == (events[-1].finish, events[-1].stop_token)


def test_an_error_keeps_its_place_and_prompts_are_not_joined() -> None:
    first, second = (TokenEvent(id="r", tokens=[n], cached_tokens=n) for n in (1, 2))
    error = EngineDead("gone")
    events: list[Event] = [first, second, error]
    assert list(joined(events)) == events


def test_a_mailbox_gives_all_that_waits() -> None:
    async def go() -> list[list[Event]]:
        mailbox, taken = Mailbox(), []
        events = [TokenEvent(id="r", tokens=[n]) for n in range(4)]

        async def reader() -> None:
            while sum(map(len, taken)) < len(events):
                taken.append(await mailbox.take())

        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)  # it waits now
        mailbox.put(events[0])
        mailbox.put(events[1])
        await asyncio.sleep(0)
        mailbox.put(events[2])
        await asyncio.sleep(0)
        mailbox.put(events[3])
        await reading
        return taken

    assert [[event.tokens[0] for event in some] for some in asyncio.run(go())] == [[0, 1], [2], [3]]


def test_a_cancelled_reader_loses_nothing() -> None:
    async def go() -> list[Event]:
        mailbox = Mailbox()
        reading = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(TokenEvent(id="r", tokens=[5]))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return await mailbox.take()

    assert len(asyncio.run(go())) == 1
