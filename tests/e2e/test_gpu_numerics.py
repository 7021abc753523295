"""An expert that gives NaN ends the requests that go to it, with its layer and number; the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_llm import GPUS, RESIDENT, launched, make_model, poison
from proa.errors import NumericsError
from proa.text.answer import Answer
from proa.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")

LAYER = 1
PROMPTS = [[20 + 7 * i] for i in range(24)]
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def answers(folder: Path, gpu: str, prefill: str) -> list[Answer | BaseException]:
    """Answers to the prompts, sent together; then to the first one that failed, sent again."""
    # experts stay where they were put
    async with launched(folder, gpu, expert_placement="uniform", prefill=prefill) as llm:
        found = await asyncio.gather(*(llm.generate(p, PARAMS) for p in PROMPTS), return_exceptions=True)
        bad = next((i for i, a in enumerate(found) if isinstance(a, BaseException)), 0)
        found += await asyncio.gather(llm.generate(PROMPTS[bad], PARAMS), return_exceptions=True)
        assert llm.engine.state == "ready"
        stats = llm.engine.stats
        assert stats.scheduler.running == stats.scheduler.waiting == 0
        assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
        return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("expert", "prefill", "where"),
    [(1, "cpu", "GPU"), (RESIDENT + 2, "cpu", "CPU"), (RESIDENT + 2, "stream", "GPU")],
)
def test_only_requests_of_that_expert_fail(gpu: str, expert: int, prefill: str, where: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    clean = asyncio.run(answers(folder, gpu, prefill))
    assert not any(isinstance(a, BaseException) for a in clean)
    poison(folder, LAYER, expert)
    got = asyncio.run(answers(folder, gpu, prefill))
    failed = [a for a in got if isinstance(a, BaseException)]
    assert 0 < len(failed) < len(PROMPTS)
    assert isinstance(got[-1], NumericsError), "it fails again, and the engine lives"
    for error in failed:
        assert isinstance(error, NumericsError)
        assert f"NaN or infinity in layer {LAYER}, from expert" in error.message
        assert error.message.endswith(f"on the {where}.")
        assert str(expert) in error.message.partition("from")[2].replace(",", "").split()
    for a, b in zip(clean[:-1], got[:-1], strict=True):
        assert isinstance(a, Answer)
        assert isinstance(b, NumericsError) or b.choices[0].tokens == a.choices[0].tokens


@pytest.mark.parametrize("gpu", GPUS)
def test_answers_fail_where_they_meet_the_expert(gpu: str, tmp_path: Path) -> None:
    """In the middle of decoding, where a GPU has started the next step already."""
    folder = make_model(tmp_path / "tiny")
    poison(folder, LAYER, 1)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    async def go() -> list[Answer | BaseException]:
        async with launched(folder, gpu) as llm:
            found = await asyncio.gather(*(llm.generate(p, params) for p in PROMPTS), return_exceptions=True)
            assert llm.engine.state == "ready"
            stats = llm.engine.stats
            assert stats.scheduler.running == stats.scheduler.waiting == 0
            assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
            return found

    got = asyncio.run(go())
    failed = [a for a in got if isinstance(a, BaseException)]
    assert 0 < len(failed) < len(PROMPTS)
    assert all(isinstance(a, NumericsError) and f"layer {LAYER}, from expert" in a.message for a in failed)
    assert all(len(a.choices[0].tokens) == 4 for a in got if isinstance(a, Answer))


@pytest.mark.parametrize("gpu", GPUS)
def test_a_long_prompt_fails_before_it_is_sampled(gpu: str, tmp_path: Path) -> None:
    """Its first chunk meets the expert: no page of it may reach the prefix cache. A message names the layer."""
    folder = make_model(tmp_path / "tiny")
    for expert in range(8):
        poison(folder, LAYER, expert)

    async def go() -> None:
        async with launched(folder, gpu, max_batch_tokens=32) as llm:
            for _ in range(2):
                with pytest.raises(NumericsError, match=f"layer {LAYER}, from expert"):
                    await llm.generate(list(range(3, 203)), PARAMS)
            assert llm.engine.stats.scheduler.pages_cached == 0
            assert llm.engine.stats.scheduler.steps == 2

    asyncio.run(go())
