"""Planned engines of a model with recurrent states: prompts continue from copies if the plan has room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import finish_all, request, tokens_of
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.building.load import load_engine
from proa.plan.prepare import prepare
from tiny import make_tiny

PROMPT = [(7 * i) % 200 + 20 for i in range(300)]
COPIES = 8  # of 2 requests


def options(gpu: str, dtype: str) -> EngineOptions:
    return EngineOptions(
        ModelOptions(dtype=dtype),
        CacheOptions(context=400, state_memory=COPIES * (3 * 6 * 16 * 32 * 4 + 3 * 3 * 256 * 4)),
        machine=MachineOptions(threads=1, cpu_binding="none"),
        gpus=GpuOptions(gpu=gpu),
    )


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [
        ("none", "float32"),
        ("none", "bfloat16"),
        ("sim:64MiB", "bfloat16"),
        pytest.param("0", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_a_prompt_goes_on(gpu: str, dtype: str, tmp_path: Path) -> None:
    """A prompt that is sent again, and the conversation's next turn, compute only their last few tokens."""
    folder = make_tiny("qwen3-next", tmp_path)
    plan = prepare(str(folder), options(gpu, dtype)).plan
    assert plan.state_copies >= COPIES, "states in bfloat16 are smaller"
    engine, _ = load_engine(plan, lambda loading: None)
    cached = {}
    answers: list[list[int]] = []
    for name, tokens in (("first", PROMPT), ("again", PROMPT), ("next", [*PROMPT, *range(30, 80)])):
        engine.submit(request(name, tokens, 40))
        events = finish_all(engine)[name]
        answers.append(tokens_of(events))
        cached[name] = events[0].cached_tokens
    assert cached == {"first": 0, "again": 288, "next": 288}
    stats = engine.stats()
    assert stats.scheduler.cached_prompt_tokens == 576
    assert 2 <= stats.scheduler.state_copies <= plan.state_copies
    assert len(answers[0]) == 40
