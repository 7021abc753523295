"""Whole engines whose experts are split over a GPU and the CPU: any mix of prefill and decode, batches that grow and
shrink over all sizes that have a graph, prefixes, preemption, sampling. A simulated GPU everywhere, a real one if any.

Near ties of routers are left out as in families/test_native_logits.py: all experts are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.split_cases import DRAWS, logits_of, run
from engine.turn_cases import case_of
from engines import finish_all, load_decoder, make_engine, request, tokens_of
from hybrid_engines import Kept, Split, load_split
from proa.native.pool import Pool
from proa.sampling.choose import choose
from proa.sampling.rows import Row
from teacher_forced import all_experts, prompts
from tiny import make_tiny

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Case:
    """Lengths of prompts and answers, the number of first tokens that all prompts share, and the engine's sizes."""

    lengths: tuple[int, ...]
    answers: tuple[int, ...]
    shared: int = 0
    engine: dict[str, int] = field(default_factory=dict)

    def texts(self) -> dict[str, list[int]]:
        made = prompts(list(self.lengths))
        return {f"r{i}": made[0][: self.shared] + text[self.shared :] for i, text in enumerate(made)}


CASES = {
    "decode in chunks of prefill": Case((41, 1, 30), (12, 20, 3), engine={"max_batch_tokens": 7}),
    "as many as there are graphs for, and more": Case(
        (5, 1, 9, 3, 3, 17, 2, 6, 4, 8, 1, 2), (2, 3, 5, 4, 7, 9, 3, 11, 2, 6, 8, 1),
        engine={"max_running": 9, "num_pages": 128, "max_batch_tokens": 24},
    ),
    "preemption": Case((24, 25, 26, 27, 28), (9,) * 5, engine={"num_pages": 40, "prefix_cache": False}),
    "a prefix that is cached": Case((30, 31, 45), (4, 5, 6), shared=20, engine={"max_running": 1}),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_no_further_from_float32_than_torch_in_bfloat16(device: str, case: str, pool: Pool, folder: Path) -> None:
    asked, override = CASES[case], all_experts(folder)
    texts = asked.texts()
    split = load_split(folder, pool, Split(0.5), device, **override)
    engine, runner, events = run(split, texts, asked.answers, asked.engine)
    assert (engine.stats().scheduler.preemptions > 0) == (case == "preemption")
    assert (engine.stats().scheduler.cached_prompt_tokens > 0) == (asked.shared > 0)
    whole = {name: tokens + tokens_of(events[name])[:-1] for name, tokens in texts.items()}
    wanted = {name: sorted(runner.logits[name]) for name in texts}
    assert {name: positions[-1] for name, positions in wanted.items()} == {n: len(t) - 1 for n, t in whole.items()}
    got = torch.stack([runner.logits[name][position] for name in texts for position in wanted[name]])
    exact, plain = (
        logits_of(load_decoder(folder, dtype, **override), whole, wanted) for dtype in (torch.float32, torch.bfloat16)
    )
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the bfloat16 reference itself is inaccurate"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_steps_give_the_same_bits(device: str, pool: Pool, folder: Path) -> None:
    asked = CASES["as many as there are graphs for, and more"]
    model = load_split(folder, pool, Split(0.5), device)
    first, second = (run(model, asked.texts(), asked.answers, asked.engine)[1].logits for _ in range(2))
    for name, rows in first.items():
        assert all(torch.equal(row, second[name][position]) for position, row in rows.items())


@pytest.mark.parametrize("device", DEVICES)
def test_draws_come_from_the_logits_of_their_row(device: str, pool: Pool, folder: Path) -> None:
    """Greedy and sampled rows in one batch; with top_k 1 only ties of the best are drawn."""
    asked = CASES["as many as there are graphs for, and more"]
    model, texts = load_split(folder, pool, Split(0.5), device), asked.texts()
    engine, runner = make_engine(model, **asked.engine)
    for i, ((name, tokens), count) in enumerate(zip(texts.items(), asked.answers, strict=True)):
        engine.submit(request(name, tokens, count, temperature=i % 2 * 1.3, top_k=1, logprobs=2))
    events = finish_all(engine)
    for name, tokens in texts.items():
        answer = tokens_of(events[name])
        rows = [runner.logits[name][len(tokens) - 1 + i] for i in range(len(answer))]
        assert [row[token] for token, row in zip(answer, rows, strict=True)] == [row.max() for row in rows]
        scores = [s for event in events[name] for s in event.logprobs or []]
        want = torch.log_softmax(torch.stack(rows), -1)[range(len(rows)), answer]
        assert [s.logprob for s in scores] == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_all_sampling_parameters_draw_as_on_the_cpu(device: str, pool: Pool, folder: Path) -> None:
    """Rows with different sampling parameters side by side in one batch, each from its own logits."""
    asked = CASES["as many as there are graphs for, and more"]
    model, texts = load_split(folder, pool, Split(0.5), device), asked.texts()
    engine, runner = make_engine(model, **asked.engine)
    sent = [
        request(name, tokens, count, **{"temperature": 1.0, "seed": 7 * i, **DRAWS[i % len(DRAWS)]})
        for i, ((name, tokens), count) in enumerate(zip(texts.items(), asked.answers, strict=True))
    ]
    for one in sent:
        engine.submit(one)
    events = finish_all(engine)
    for one in sent:
        answer = tokens_of(events[one.id])
        for i, token in enumerate(answer):
            row = Row(one.sampling, one.tokens + answer[:i], len(one.tokens))
            logits = runner.logits[one.id][len(one.tokens) - 1 + i][None]
            assert choose([int(logits.argmax())], [row], logits)[0].token == token


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_long_prompts(device: str, pool: Pool, folder: Path) -> None:
    """More rows than are scored at once, beside a request that decodes."""
    model = load_split(folder, pool, Split(0.5), device)
    engine, runner = make_engine(model, num_pages=128)
    texts = dict(zip(("short", "long", "longer"), prompts([3, 90, 150]), strict=True))
    for name, tokens in texts.items():
        engine.submit(request(name, tokens, 20 if name == "short" else 2, prompt_logprobs=2))
    events = finish_all(engine)
    for name, tokens in texts.items():
        (scores,) = [e.prompt_logprobs for e in events[name] if e.prompt_logprobs is not None]
        rows = torch.stack([runner.logits[name][p] for p in range(len(tokens) - 1)])
        want = torch.log_softmax(rows, -1)[range(len(rows)), tokens[1:]]
        assert scores[0] is None
        assert [s.logprob for s in scores[1:] if s] == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_behind_the_end_of_an_answer_ends_no_other_request(device: str, pool: Pool, folder: Path) -> None:
    """A step launched ahead computes one more token of an answer that had ended, which is discarded."""
    kept: list[Kept] = []
    case = case_of(load_split(folder, pool, Split(1.0), device, keep=kept), turns=False)
    case.engine.submit(request("first", [5, 6, 7], 6))
    end = tokens_of(finish_all(case.engine)["first"])[-1]
    dict(kept[0].model.parameters())["embed.weight"][end] = torch.nan
    case.engine.submit(request("ended", [5, 6, 7], 6, stop_token_ids=(end,)))
    case.engine.submit(request("going on", [9, 6, 3], 12, logit_bias={end: -100.0}))
    events = [event for _ in range(4) for event in case.engine.step()]
    while not any(event.finish for event in events):
        events += case.engine.step()
    later = [token for token in range(40, 70) if token != end]
    case.engine.submit(request("later", later, 4, logit_bias={end: -100.0}))
    rest = finish_all(case.engine)
    assert [event.finish for event in events if event.finish] == ["stop"]
    assert {name: of[-1].finish for name, of in rest.items()} == {"going on": "length", "later": "length"}
