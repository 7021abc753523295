"""The rules of beam search against an independent loop without stopping, and against all sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.beam.search import Beam, BeamRules, BeamSearch, Candidates

END = 0
Model = Callable[[tuple[int, ...]], list[float]]  # generated tokens -> logprobs of the next one


def model_of(seed: int, vocab: int, *, coarse: bool = False) -> Model:
    """A distribution that depends on all tokens before; coarse: with many ties."""

    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        state = hash((seed, *tokens))  # of ints: the same in every process
        scores = [float((state >> 5 * i) % 32) / 6 for i in range(vocab)]
        if coarse:
            scores = [float(round(score / 4)) for score in scores]
        total = math.log(sum(map(math.exp, scores)))
        return [score - total for score in scores]

    return logprobs


def search(model: Model, rules: BeamRules, most: int | None = None) -> BeamSearch:
    """Run a search; `most`: number of candidates per beam, by default those that the rules ask for."""
    beams = BeamSearch(rules)
    while beams.live:
        beams.advance([best(model(beam.tokens), most or rules.candidates) for beam in beams.live])
    return beams


def best(logprobs: list[float], most: int) -> Candidates:
    return sorted(enumerate(logprobs), key=lambda item: -item[1])[:most]


def all_answers(model: Model, rules: BeamRules, tokens: tuple[int, ...] = (), total: float = 0.0) -> Iterator[Beam]:
    """Every answer: finished by the end token, or max_tokens long."""
    if len(tokens) == rules.max_tokens:
        yield Beam(tokens, total=total)
        return
    for token, logprob in enumerate(model(tokens)):
        if token not in rules.ends:
            yield from all_answers(model, rules, (*tokens, token), total + logprob)
        elif len(tokens) >= rules.min_tokens:
            yield Beam(tokens, total=total + logprob, end=token)


def without_stopping(model: Model, rules: BeamRules) -> list[float]:
    """Scores of the best `width` answers, by a plain loop over the whole vocabulary that always runs to max_tokens."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    scores = []
    for step in range(1, rules.max_tokens + 1):
        grown = [(total + lp, (*tokens, t)) for total, tokens in live for t, lp in enumerate(model(tokens))]
        grown = [one for one in grown if one[1][-1] not in rules.ends or step > rules.min_tokens]
        grown.sort(key=lambda one: -one[0])
        scores += [one[0] / step**rules.length_penalty for one in grown[: rules.width] if one[1][-1] in rules.ends]
        live = [one for one in grown if one[1][-1] not in rules.ends][: rules.width]
    scores += [one[0] / rules.max_tokens**rules.length_penalty for one in live]
    return sorted(scores, reverse=True)[: rules.width]


SEEDS = st.integers(0, 2**20)
PENALTIES = st.sampled_from([-1.5, 0.0, 0.5, 1.0, 2.0])


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(2, 4), st.integers(1, 4), st.integers(0, 2), PENALTIES)
def test_a_wide_search_finds_the_best_of_all_answers(
    seed: int, vocab: int, most: int, least: int, penalty: float
) -> None:
    model = model_of(seed, vocab)
    rules = BeamRules(
        width=vocab**most, max_tokens=most, ends=frozenset({END}), min_tokens=min(least, most), length_penalty=penalty
    )
    expected = sorted(all_answers(model, rules), key=rules.score, reverse=True)
    found = search(model, rules).finished
    assert [rules.score(beam) for beam in found] == pytest.approx([rules.score(beam) for beam in expected])
    assert {(beam.tokens, beam.end) for beam in found} == {(beam.tokens, beam.end) for beam in expected}


@settings(max_examples=examples(150), deadline=None)
@given(SEEDS, st.integers(3, 9), st.integers(1, 5), st.integers(1, 7), st.integers(0, 3), PENALTIES)
def test_stopping_and_few_candidates_lose_nothing(
    seed: int, vocab: int, width: int, most: int, least: int, penalty: float
) -> None:
    model = model_of(seed, vocab)
    ends = frozenset({END, 1}) if seed % 2 else frozenset({END})
    rules = BeamRules(width=width, max_tokens=most, ends=ends, min_tokens=min(least, most), length_penalty=penalty)
    found = search(model, rules).finished
    assert [rules.score(beam) for beam in found] == pytest.approx(without_stopping(model, rules))


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, st.integers(2, 6), st.integers(1, 5), st.integers(1, 7))
def test_invariants(seed: int, vocab: int, width: int, most: int) -> None:
    model = model_of(seed, vocab, coarse=True)
    for early in (False, True):
        rules = BeamRules(width=width, max_tokens=most, ends=frozenset({END}), early_stopping=early, top=2)
        found = search(model, rules).finished
        scores = [rules.score(beam) for beam in found]
        assert scores == sorted(scores, reverse=True)
        assert len({(beam.tokens, beam.end) for beam in found}) == len(found) <= width
        for beam in found:
            assert END not in beam.tokens
            assert 1 <= beam.length <= most
            assert (beam.length == most) or beam.end == END
            parts = [model(beam.tokens[:i])[token] for i, token in enumerate(beam.tokens)]
            assert [(entry.token, entry.logprob) for entry in beam.logprobs] == list(
                zip(beam.tokens, parts, strict=True)
            )
            assert all(len(entry.top) == 2 for entry in beam.logprobs)
            last = model(beam.tokens)[END] if beam.end == END else 0.0
            assert beam.total == pytest.approx(sum(parts) + last)


def fixed(*steps: dict[tuple[int, ...], list[float]]) -> Model:
    """Probabilities by the tokens before, as logprobs."""
    table = {tokens: values for step in steps for tokens, values in step.items()}
    return lambda tokens: [math.log(p) if p else -math.inf for p in table[tokens]]


LOCAL = fixed({(): [0.0, 0.6, 0.4]}, {(1,): [0.4, 0.3, 0.3], (2,): [0.9, 0.05, 0.05]})
SHORT = fixed(
    {(): [0.5, 0.5, 0.0]}, {(1,): [0.1, 0.0, 0.9]}, {(1, 2): [0.9, 0.1, 0.0]}, {(1, 2, 1): [1.0, 0.0, 0.0]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "answers"),
    [
        (1, [(1,)]),  # greedy: 0.6 * 0.4
        (2, [(2,), (1,)]),  # 0.4 * 0.9 first
    ],
)
def test_a_second_beam_finds_what_greedy_misses(width: int, answers: list[tuple[int, ...]]) -> None:
    found = search(LOCAL, BeamRules(width=width, max_tokens=2, ends=frozenset({END}))).finished
    assert [(beam.tokens, beam.end) for beam in found] == [(tokens, END) for tokens in answers]


@pytest.mark.parametrize(
    ("penalty", "early", "first"),
    [
        (0.0, False, ()),  # 0.5 against 0.5 * 0.9 * 0.9
        (1.0, False, (1, 2)),  # log 0.5 / 1 against log 0.405 / 3: the end token counts in the length
        (1.0, True, ()),  # the first finished beam ends the search
        (-1.0, False, ()),
    ],
)
def test_length_penalty_and_early_stopping(penalty: float, early: bool, first: tuple[int, ...]) -> None:
    rules = BeamRules(width=1, max_tokens=4, ends=frozenset({END}), length_penalty=penalty, early_stopping=early)
    (found,) = search(SHORT, rules).finished
    assert (found.tokens, found.end) == (first, END)


def test_impossible_tokens_make_no_beams() -> None:
    found = search(SHORT, BeamRules(width=5, max_tokens=2, ends=frozenset({END}))).finished
    assert {beam.tokens for beam in found} == {(), (1,), (1, 2)}
