"""Random requests with common beginnings, and what is compared of their answers. Never: tests."""

from __future__ import annotations

from random import Random
from typing import Any

from engines import request, tokens_of
from proa.types import EngineRequest, TokenEvent

WISHES: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 2},
    {"repetition_penalty": 1.5, "logprobs": 0}, {"temperature": 1.0, "frequency_penalty": 1.0, "seed": 8},
]  # fmt: skip


def requests(seed: int, vocab: int, count: int = 12) -> list[EngineRequest]:
    """Prompts that share beginnings, answers of all lengths; half of them may stop at one of many tokens."""
    random = Random(seed)
    stem = [random.randrange(vocab) for _ in range(20)]
    return [
        request(
            f"r{i}", stem[: random.randrange(1, 20)] + [random.randrange(vocab) for _ in range(random.randrange(1, 9))],
            random.randrange(1, 24), **random.choice(WISHES), min_tokens=random.choice([0, 0, 5]) if i % 2 else 0,
            eos_token_ids=tuple(range(0, vocab, 7)) if i % 2 else (),
        )
        for i in range(count)
    ]  # fmt: skip


class Near(float):
    """A log-probability that equals others within rounding: steps of other sizes differ by some 1e-6."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    __hash__ = None  # type: ignore[assignment]


def outcome(events: list[TokenEvent]) -> tuple[Any, ...]:
    scores = [s for event in events for s in event.logprobs or []]
    told = [(s.token, Near(s.logprob), [t for t, _ in s.top]) for s in scores]
    return tokens_of(events), events[-1].finish, events[-1].stop_token, told
