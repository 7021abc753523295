"""Request: how an answer ends, and the legal transitions of its state."""

from __future__ import annotations

import pytest

from proa.cache.radix import PrefixNode
from proa.engine.scheduling.request import Request, State
from proa.types import EngineRequest, FinishReason, Sampling


def make(prompt: int = 3, context_tokens: int = 100, **sampling: object) -> Request:
    wishes = Sampling(**{"max_tokens": 10, "eos_token_ids": (0,), "stop_token_ids": (7, 8), **sampling})
    source = EngineRequest(id="r", tokens=list(range(prompt)), sampling=wishes)
    return Request(source, context_tokens=context_tokens, page_tokens=4)


@pytest.mark.parametrize(
    ("wishes", "sampled", "answer", "finish", "stop_token"),
    [
        ({}, [5, 6, 0], [5, 6], "stop", 0),
        ({}, [0], [], "stop", 0),
        ({}, [5, 8], [5], "stop", 8),
        ({"eos_token_ids": ()}, [0, 0, 7], [0, 0], "stop", 7),
        ({"max_tokens": 2}, [5, 6], [5, 6], "length", None),
        ({"max_tokens": 1}, [5], [5], "length", None),
        ({"max_tokens": 2}, [5, 0], [5], "stop", 0),
        ({"min_tokens": 2}, [5, 0, 0], [5, 0], "stop", 0),
        ({"min_tokens": 2}, [7, 8, 7], [7, 8], "stop", 7),
        ({"min_tokens": 9, "max_tokens": 2}, [0, 0], [0, 0], "length", None),
        ({"context_tokens": 5}, [5, 6], [5, 6], "length", None),
        ({"context_tokens": 5}, [5, 0], [5], "stop", 0),
    ],
)
def test_how_an_answer_ends(
    wishes: dict[str, int], sampled: list[int], answer: list[int], finish: FinishReason, stop_token: int | None
) -> None:
    request = make(**wishes)
    assert [request.append(token) for token in sampled[:-1]] == [None] * (len(sampled) - 1)
    assert request.append(sampled[-1]) == finish
    assert request.tokens[3:] == answer
    assert request.num_generated == len(answer)
    assert request.stop_token == stop_token


@pytest.mark.parametrize(
    ("path", "is_legal"),
    [
        ("admit preempt admit finish", True),
        ("finish", True),
        ("admit finish", True),
        ("admit admit", False),
        ("preempt", False),
        ("admit preempt preempt", False),
        ("finish finish", False),
        ("finish admit", False),
        ("admit finish preempt", False),
    ],
)
def test_transitions(path: str, is_legal: bool) -> None:
    request = make()
    moves = {
        "admit": lambda: request.admit([], None, 0),
        "preempt": request.preempt,
        "finish": request.finish,
    }
    *before, last = path.split()
    for move in before:
        moves[move]()
    if is_legal:
        moves[last]()
        assert request.state is State.FINISHED
    else:
        with pytest.raises(RuntimeError, match="cannot go from"):
            moves[last]()


def test_truncate_never_reaches_into_shared_pages() -> None:
    request = make(prompt=9)
    request.admit([0, 1, 2], PrefixNode("b", 1, PrefixNode("a", 0, PrefixNode("", -1, None))), 0)
    assert (request.num_shared, request.num_shareable, request.num_computed) == (8, 8, 12)
    request.truncate(9)
    request.truncate(99)
    assert request.num_computed == 9
    request.truncate(8)
    with pytest.raises(ValueError, match="cannot be truncated to 7 tokens"):
        request.truncate(7)
