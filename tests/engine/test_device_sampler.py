"""DeviceSampler gives the CPU sampler's results, step after step. Without a GPU its kernels are interpreted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from grammars import matcher
from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.engine.executors.device_sampler import DeviceSampler
from proa.ops.cuda_device import device_ops
from proa.ops.reference import argmax
from proa.sampling.adjust import adjust
from proa.sampling.choose import SampledToken, choose
from proa.sampling.edits import LogitEdits
from proa.sampling.logprobs import token_logprobs
from proa.sampling.rows import Row
from proa.types import Constraint, Sampling

VOCAB = 60
OPS = device_ops(torch.device("meta"))


def row(name: str, tokens: list[int], num_prompt: int, **wishes: Any) -> Row:
    return Row(Sampling(max_tokens=100, **wishes), tokens, num_prompt, name)


def sampler_of(rows: int, device: torch.device, **limits: int) -> DeviceSampler:
    return DeviceSampler(rows, VOCAB, device, OPS, DeviceLogprobs(rows, VOCAB, device, OPS), **limits)


def on_device(
    sampler: DeviceSampler, logits: torch.Tensor, rows: Sequence[Row], device: torch.device
) -> list[SampledToken]:
    there, tokens = logits.to(device), argmax(logits).int().to(device)
    sampler.launch(there, tokens, rows)
    choices = sampler.read(tokens.tolist(), rows, there)
    assert torch.equal(there.cpu().nan_to_num(7.0), logits.nan_to_num(7.0)), "the sampler must restore the logits"
    return choices


def assert_same(got: Sequence[SampledToken], want: Sequence[SampledToken]) -> None:
    assert [c.token for c in got] == [c.token for c in want]
    for a, b in zip(got, want, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob and b.logprob:
            assert a.logprob.token == a.token
            assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-5, rel=1e-6)
            assert [t for t, _ in a.logprob.top] == [t for t, _ in b.logprob.top]
            assert [p for _, p in a.logprob.top] == pytest.approx([p for _, p in b.logprob.top], abs=1e-5, rel=1e-6)


ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, explained": {"temperature": 0.0, "logprobs": 2},
    "penalised and greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
    "plain": {"logprobs": 60},
    "cut": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "logprobs": 100},
    "all penalties": {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 0.8, "min_p": 0.02},
    "biased": {"logit_bias": {3: 4.0, 59: -100.0, 7: 2.5}, "frequency_penalty": 0.5, "top_k": 3},
    "not yet": {"min_tokens": 4, "eos_token_ids": (5, 6), "stop_token_ids": (6, 3), "logit_bias": {5: 9.0}},
}


def test_answers_of_eight_steps(rng: torch.Generator, device: torch.device) -> None:
    """Requests that come and go in changing order, each with its own history."""
    sampler = sampler_of(len(ANSWERS), device)
    texts = {name: [1, 3, 3, 40 + i] for i, name in enumerate(ANSWERS)}
    for step in range(8):
        names = [name for i, name in enumerate(ANSWERS) if (step * i) % 5 != 4][:: 1 - 2 * (step % 2)]
        rows = [row(name, texts[name], 4, seed=11, **ANSWERS[name]) for name in names]
        logits = torch.randn(len(rows), VOCAB, generator=rng) * 2
        want = choose(argmax(logits).tolist(), rows, logits)
        assert_same(on_device(sampler, logits, rows, device), want)
        for name, choice in zip(names, want, strict=True):
            texts[name].append(choice.token)


def test_constrained_rows(rng: torch.Generator, device: torch.device) -> None:
    """Masks hold beside free rows, also in the last word, and do not touch log-probabilities."""
    vocab, free, last = 288, range(5, 10), 0xC4
    pattern = Constraint.regex("[\x05-\x09\u0100]{5}")  # the tokens `free`, and the first byte of U+0100: `last`
    wishes = [*ANSWERS.values(), {"temperature": 0.0, "logprobs": 3}]
    count = 2 * len(wishes)
    sampler = DeviceSampler(count, vocab, device, OPS, DeviceLogprobs(count, vocab, device, OPS))
    for step in range(2):
        rows = [
            row(f"r{i}", [1, 3, 3, 40, *[7] * step], 4, seed=i, **wish) for i, wish in enumerate([*wishes, *wishes])
        ]
        for constrained in rows[::2]:
            constrained.matcher = matcher(pattern, num_tokens=vocab)
        logits = torch.randn(len(rows), vocab, generator=rng) * 2
        logits[::4, last] += 5.0
        want = choose(argmax(logits).tolist(), rows, logits)
        assert_same(on_device(sampler, logits, rows, device), want)
        assert {choice.token for choice in want[::2]} <= {*free, last}
        assert last in {choice.token for choice in want[::2]}
        assert not {choice.token for choice in want[1::2]} <= {*free, last}


def test_non_finite_rows(rng: torch.Generator, device: torch.device) -> None:
    """They get token -1 with any sampling parameters, and do not change the other rows."""
    names = list(ANSWERS)
    rows = [row(name, [1, 2], 2, **ANSWERS[name]) for name in names]
    logits = torch.randn(len(rows), VOCAB, generator=rng)
    clean = choose(argmax(logits).tolist(), rows, logits)
    bad = {1: math.nan, 3: math.inf, 4: -math.inf, 5: math.nan}
    for i, value in bad.items():
        logits[i, 7 * i] = value
    got = on_device(sampler_of(len(rows), device), logits, rows, device)
    assert [i for i, choice in enumerate(got) if choice == SampledToken(-1)] == list(bad)
    kept = [i for i in range(len(rows)) if i not in bad]
    assert_same([got[i] for i in kept], [clean[i] for i in kept])


def test_rows_with_too_many_edits_are_sampled_on_the_cpu(rng: torch.Generator, device: torch.device) -> None:
    rows = [
        row("long", list(range(40)), 40, repetition_penalty=1.2, logprobs=1),
        row("longer", list(range(50)), 50, repetition_penalty=1.2, temperature=0.0, logprobs=3),
        row("short", [1, 2], 2, repetition_penalty=1.2, top_p=0.9),
        row("broken", list(range(50)), 50, repetition_penalty=1.2, logprobs=2),
    ]
    logits = torch.randn(len(rows), VOCAB, generator=rng)
    logits[3, 3] = math.nan
    sampler = sampler_of(len(rows), device, most_edits=45)
    for _ in range(2):
        got = on_device(sampler, logits, rows, device)
        assert_same(got, choose(argmax(logits).tolist(), rows, logits))
        assert [choice.late for choice in got] == [False, True, False, False]


def test_a_flat_distribution_is_sampled_on_the_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa.engine.executors.device_sampler.MOST_KEPT", 16)
    rows = [row("flat", [1], 1, top_p=0.9, logprobs=1), row("peaked", [1], 1, top_p=0.9, logprobs=1)]
    logits = torch.arange(2.0)[:, None] * torch.linspace(0, 60, VOCAB)
    want = choose(argmax(logits).tolist(), rows, logits)
    got = on_device(sampler_of(2, device), logits, rows, device)
    assert [c.token for c in got] == [c.token for c in want]
    assert got[0] == SampledToken(want[0].token, want[0].logprob, late=True), "with the CPU's own log-probabilities"


@pytest.mark.parametrize("wishes", ANSWERS.values(), ids=ANSWERS)
def test_one_row_alone(wishes: dict[str, Any], rng: torch.Generator, device: torch.device) -> None:
    rows = [row("alone", [1, 2, 2], 1, **wishes)]
    logits = torch.randn(1, VOCAB, generator=rng)
    want = choose(argmax(logits).tolist(), rows, logits)
    assert_same(on_device(sampler_of(1, device), logits, rows, device), want)


def test_greedy_rows_get_nothing_from_an_earlier_step(device: torch.device) -> None:
    logits = torch.zeros(2, VOCAB)
    rows = [row("a", [1], 1, temperature=0.0), row("b", [1], 1, temperature=0.0)]
    sampler = sampler_of(2, device)
    on_device(sampler, logits, [row("c", [1], 1, logprobs=3)], device)
    assert on_device(sampler, logits, rows, device) == [SampledToken(0), SampledToken(0)], "logprobs of the step before"


def test_log_probabilities_of_given_tokens(rng: torch.Generator, device: torch.device) -> None:
    logits, logprobs = torch.randn(9, VOCAB, generator=rng) * 3, DeviceLogprobs(12, VOCAB, device, OPS)
    for number, top in ((9, 3), (2, 0), (1, 99)):
        tokens = torch.randint(VOCAB, (number,), generator=rng).tolist()
        logprobs.launch_given(logits.to(device), tokens, top)
        if device.type == "cuda":
            torch.cuda.synchronize()  # as DeviceLogprobs.read requires
        got, want = logprobs.read(tokens), token_logprobs(logits[:number], tokens, top)
        assert_same([SampledToken(t, g) for t, g in zip(tokens, got, strict=True)],
                    [SampledToken(t, w) for t, w in zip(tokens, want, strict=True)])  # fmt: skip


HISTORIES = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
CHANGES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.1, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.7]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
        "min_tokens": st.integers(0, 8),
        "eos_token_ids": st.sampled_from([(), (4,)]),
        "stop_token_ids": st.sampled_from([(), (4, 9)]),
    }
)


@settings(deadline=None)
@given(HISTORIES, st.lists(st.integers(0, VOCAB - 1), max_size=80), CHANGES, st.integers(0, 2**31))
def test_edits_give_the_bits_of_the_definition(
    prompt: list[int], answer: list[int], changes: dict[str, Any], seed: int
) -> None:
    """Whether edits are kept up to date token by token or made at the end."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    kept = LogitEdits(row("r", prompt, len(prompt), **changes))
    for length in range(len(answer) + 1):
        now = row("r", prompt + answer[:length], len(prompt), **changes)
        edits = torch.from_numpy(kept.edits(now))
    whole = torch.from_numpy(LogitEdits(now).edits(now))
    assert sorted(whole.tolist()) == sorted(edits.tolist())
    assert len({token for token, *_ in edits.tolist()}) == len(edits)
    got, tokens = logits.clone(), edits[:, 0].long()
    repetition, less, plus = edits[:, 1:].contiguous().view(torch.float32).T
    values = got[tokens]
    got[tokens] = torch.where(values > 0, values / repetition, values * repetition) - less + plus
    assert torch.equal(got, adjust(logits[None], [now])[0])
