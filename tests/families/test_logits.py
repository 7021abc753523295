"""Every family against transformers in float32, however the engine batches and chunks the work.

The oracle prefills the prompt and then decodes token by token with its own cache. Bound: 1e-4 of the logits'
scale, i.e. of the largest reference logit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import RecordingRunner, finish_all, load_decoder, make_engine, request, tokens_of
from proa.engine.engine import Engine
from tiny import TINY, make_tiny

pytestmark = pytest.mark.one_table  # a family and a way to batch
ANSWER = 9
PROMPT = 41  # longer than every window and than the original positions of the scaled ropes


@pytest.fixture(scope="module", params=sorted(TINY))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[[list[int], int], Tensor]:
    """(tokens, prompt length) -> float32 [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # transformers 5.24 renamed the argument.
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def logits(tokens: list[int], num_prompt: int) -> Tensor:
        with torch.inference_mode():
            model(torch.tensor([[1]]))  # dynamic rope remembers the longest sequence until it sees a short one
            out = model(torch.tensor([tokens[:num_prompt]]), use_cache=True)
            rows = [out.logits[0]]
            for token in tokens[num_prompt:]:
                out = model(torch.tensor([[token]]), use_cache=True, **{cache: out.past_key_values})
                rows.append(out.logits[0])
        return torch.cat(rows)

    return logits


def prompt(n: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(
    engine: Engine, runner: RecordingRunner, prompts: dict[str, list[int]], oracle: Callable[[list[int], int], Tensor]
) -> None:
    """Run greedily to the end; every recorded row must match, and so must every token chosen."""
    for name, tokens in prompts.items():
        engine.submit(request(name, tokens, ANSWER))
    events = finish_all(engine)
    for name, tokens in prompts.items():
        answer = tokens_of(events[name])
        assert len(answer) == ANSWER
        want = oracle(tokens + answer[:-1], len(tokens))
        rows = runner.logits[name]
        assert max(rows) == len(want) - 1
        got = torch.stack([rows[p] for p in sorted(rows)])
        want = want[sorted(rows)]
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_prefill_and_decode(folder: Path, oracle: Callable[[list[int], int], Tensor]) -> None:
    engine, runner = make_engine(load_decoder(folder))
    check(engine, runner, {"a": prompt(PROMPT, 1)}, oracle)
    assert sorted(runner.logits["a"]) == list(range(PROMPT + ANSWER - 1)), "every row was computed"


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunked_prefill(folder: Path, oracle: Callable[[list[int], int], Tensor], chunk: int) -> None:
    engine, runner = make_engine(load_decoder(folder), max_batch_tokens=chunk)
    check(engine, runner, {"a": prompt(PROMPT, 2)}, oracle)


def test_batch_of_different_lengths(folder: Path, oracle: Callable[[list[int], int], Tensor]) -> None:
    engine, runner = make_engine(load_decoder(folder), num_pages=128, max_batch_tokens=50)
    check(engine, runner, {f"r{n}": prompt(n, n) for n in (1, 2, 5, 16, 17, 33, PROMPT)}, oracle)


def test_after_a_prefix_hit(folder: Path, oracle: Callable[[list[int], int], Tensor]) -> None:
    model = load_decoder(folder)
    engine, runner = make_engine(model)
    shared = prompt(20, 3)
    check(engine, runner, {"first": shared + prompt(7, 4)}, oracle)
    if model.spec.recurrent:  # a copy of states is taken at a branch once a second request takes it
        check(engine, runner, {"branch": shared + prompt(8, 6)}, oracle)
    check(engine, runner, {"second": shared + prompt(9, 5)}, oracle)
    assert min(runner.logits["second"]) == 20, "the shared pages were computed again"


def test_after_preemption(folder: Path, oracle: Callable[[list[int], int], Tensor]) -> None:
    """Five requests that need 25 pages each at their end, with 40 pages: some must be preempted and recomputed."""
    engine, runner = make_engine(load_decoder(folder), num_pages=40, prefix_cache=False)
    check(engine, runner, {f"r{i}": prompt(24 + i, 10 + i) for i in range(5)}, oracle)
    assert engine.stats().scheduler.preemptions > 0
