"""The sampler: correct distribution, independence of rows, exact greedy."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proa.sampling.adjust import adjust
from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.sampling.sampler import HEAD_TOKENS, sample
from proa.types import Sampling

VOCAB = 12


def row(tokens: list[int] | None = None, num_prompt: int = 1, **wishes: object) -> Row:
    return Row(Sampling(max_tokens=100, **wishes), tokens or [0], num_prompt)


def draws(logits: torch.Tensor, n: int, **wishes: object) -> Counter[int]:
    return Counter(sample(logits.expand(n, -1), [row(seed=i, **wishes) for i in range(n)]))


def expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Compute the distribution by its definition, token by token."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    mass, nucleus, total = 0.0, [], sum(float(probs[t]) for t in kept)
    for t in kept:
        if mass < top_p * total or not nucleus:
            nucleus.append(t)
        mass += float(probs[t])
    nucleus = [t for t in nucleus if probs[t] >= min_p * probs[order[0]]]
    out = torch.zeros_like(probs)
    out[nucleus] = probs[nucleus]
    return out / out.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.3, 6, 0.8, 0.1),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-9, 0.0),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float, rng: torch.Generator) -> None:
    logits = torch.randn(VOCAB, generator=rng) * 2
    n = 4000
    want = expected(logits, temperature, top_k, top_p, min_p)
    got = draws(logits, n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(got) <= set(torch.nonzero(want)[:, 0].tolist())
    for token, p in enumerate(want.tolist()):
        # five standard deviations of a binomial: one false alarm in two million
        assert abs(got[token] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1e-6, token


def test_wide_vocabulary_beyond_the_head() -> None:
    """In a flat distribution top-p keeps more than HEAD_TOKENS tokens."""
    vocab = 64 * HEAD_TOKENS
    got = draws(torch.zeros(vocab), 400, temperature=1.0, top_p=0.999)
    assert len(got) > 300
    assert max(got) > 32 * HEAD_TOKENS


wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.1]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}]),
    }
)


def test_top_k_beyond_the_head() -> None:
    """With top_k above HEAD_TOKENS, exactly the top_k tokens are sampled from."""
    logits = torch.arange(4 * HEAD_TOKENS).float() / 1e4
    got = draws(logits, 400, temperature=1.0, top_k=2 * HEAD_TOKENS)
    assert min(got) >= 2 * HEAD_TOKENS
    assert min(got) < 3 * HEAD_TOKENS - HEAD_TOKENS // 2


@pytest.mark.parametrize("top_k", [HEAD_TOKENS, HEAD_TOKENS + 1, 100, 399, 400])
def test_top_p_is_a_share_of_what_top_k_keeps(top_k: int) -> None:
    """Also beyond the head, where the first tokens alone do not show their sum."""
    logits = torch.linspace(0, -0.01, 400)
    want = torch.nonzero(expected(logits, 1.0, top_k, 0.1, 0.0))[:, 0].tolist()
    assert len(want) <= HEAD_TOKENS
    assert sorted(draws(logits, 2000, temperature=1.0, top_k=top_k, top_p=0.1)) == want


@pytest.mark.parametrize("top_k", [0, 20, HEAD_TOKENS])
def test_the_most_likely_of_a_large_vocabulary_are_found(top_k: int, rng: torch.Generator) -> None:
    """The tokens that may be drawn are those of torch.topk, wherever in the vocabulary they are."""
    logits = torch.randn(150 * HEAD_TOKENS + 7, generator=rng) * 3
    logits[-1] = 12.0
    got = draws(logits, 2000, temperature=1.0, top_k=top_k, top_p=0.9)
    want = expected(logits, 1.0, top_k, 0.9, 0.0)
    assert set(got) <= set(torch.nonzero(want)[:, 0].tolist())
    assert {int(token) for token in want.topk(3).indices} <= set(got)


def test_temperatures_too_small_for_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.5, -math.inf]])
    for truncated in ({}, {"top_p": 0.5}):
        assert sample(logits, [row(temperature=1e-300, **truncated)]) == [2]


@given(st.lists(wishes, min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([50, 2 * HEAD_TOKENS]))
def test_rows_are_independent(asked: list[dict[str, object]], seed: int, vocab: int) -> None:
    logits = torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(seed))
    rows = [row([1, 2, 3, 3, 7], 2, **w) for w in asked]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    assert together == alone


def test_same_seed_same_tokens_and_another_position_another_draw() -> None:
    logits = torch.zeros(1, 1000)
    first = row([1, 2], 1, temperature=1.0, seed=5)
    assert sample(logits, [first]) == sample(logits, [first])
    moved = {sample(logits, [msgspec.structs.replace(first, tokens=[1, *range(n)])])[0] for n in range(50)}
    assert len(moved) > 40


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [9.0, 0.0, 0.0, 9.5]])
    assert sample(logits, [row(temperature=0.0)] * 2) == [1, 3]


PENALTIES = [
    ("repetition divides positive", {"repetition_penalty": 2.0}, [4.0, 3.0, -1.0], [0], 1, [2.0, 3.0, -1.0]),
    (
        "repetition multiplies negative",
        {"repetition_penalty": 2.0},
        [4.0, 3.0, -1.0],
        [2],
        1,
        [4.0, 3.0, -2.0],
    ),
    ("repetition sees the answer", {"repetition_penalty": 2.0}, [4.0, 3.0, 1.0], [2, 0], 1, [2.0, 3.0, 0.5]),
    ("presence once, answer only", {"presence_penalty": 1.5}, [4.0, 3.0, 1.0], [1, 0, 0], 1, [2.5, 3.0, 1.0]),
    ("frequency per use", {"frequency_penalty": 0.5}, [4.0, 3.0, 1.0], [1, 0, 0], 1, [3.0, 3.0, 1.0]),
    ("bias", {"logit_bias": {2: 10.0}}, [4.0, 3.0, 1.0], [1], 1, [4.0, 3.0, 11.0]),
    (
        "no eos yet",
        {"min_tokens": 2, "eos_token_ids": (0,)},
        [4.0, 3.0, 1.0],
        [1, 1],
        1,
        [-math.inf, 3.0, 1.0],
    ),
    ("eos at last", {"min_tokens": 1, "eos_token_ids": (0,)}, [4.0, 3.0, 1.0], [1, 1], 1, [4.0, 3.0, 1.0]),
]


@pytest.mark.parametrize(("wish", "before", "tokens", "num_prompt", "after"), [c[1:] for c in PENALTIES],
                         ids=[c[0] for c in PENALTIES])  # fmt: skip
def test_adjustments(
    wish: dict[str, object], before: list[float], tokens: list[int], num_prompt: int, after: list[float]
) -> None:
    logits = torch.tensor([before])
    assert adjust(logits, [row(tokens, num_prompt, **wish)]).tolist() == [after]
    assert logits.tolist() == [before], "the input must stay as it is: log-probabilities read it"


def test_logprobs_are_of_the_plain_distribution(rng: torch.Generator) -> None:
    logits = torch.randn(VOCAB, generator=rng)
    want = torch.log_softmax(logits.double(), -1)
    got = token_logprob(logits, 3, 4)
    assert got.token == 3
    assert got.logprob == pytest.approx(float(want[3]), abs=1e-5)
    assert [t for t, _ in got.top] == want.argsort(descending=True)[:4].tolist()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=type(got)) == got


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-12])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, cut: dict[str, object], rng: torch.Generator) -> None:
    logits = torch.randn(1, 3000, generator=rng) * 5
    assert sample(logits, [row(temperature=temperature, seed=1, **cut)]) == [int(logits.argmax())]
