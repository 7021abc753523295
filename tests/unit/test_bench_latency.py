"""`proa bench latency` over a scripted engine: which requests are timed, and which errors are raised."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import FakeEngine, Reply, make_plan, make_tokenizer
from proa.bench.latency import LatencyOptions, engine_target, measure
from proa.bench.result import Result
from proa.errors import ProaError
from proa.llm import AsyncLLM
from proa.text.tokenizer import Tokenizer

OPTIONS = LatencyOptions(prompt_tokens=20, output_tokens=6, runs=3, warmup=2)


def bench(folder: Path, engine: FakeEngine, options: LatencyOptions = OPTIONS) -> Result:
    async def run() -> Result:
        llm = AsyncLLM(make_plan(), engine, Tokenizer.load(make_tokenizer(folder)))
        return await measure(engine_target(llm, options.output_tokens), options)

    return asyncio.run(run())


def test_times_every_run_and_not_the_warmup(tmp_path: Path) -> None:
    engine = FakeEngine(Reply(tokens=[65, 66, 67, 68, 69, 70, 71, 72], delay_s=0.01))
    made = bench(tmp_path, engine)
    assert len(engine.requests) == 5
    assert {len(r.tokens) for r in engine.requests} == {20}
    assert len({tuple(r.tokens[:2]) for r in engine.requests}) == 5
    assert {r.sampling.max_tokens for r in engine.requests} == {6}
    assert {r.sampling.eos_token_ids for r in engine.requests} == {()}  # ignore_eos
    figures = {name: value for name, value in made.figures.items() if value is not None}
    assert 10 <= figures["ttft_ms_median"] < 1000  # every event is delayed by 10 ms, the first one too
    assert 10 <= figures["tpot_ms_median"] < 1000
    assert figures["decode_tokens_per_s"] == pytest.approx(1000 / figures["tpot_ms_median"], rel=0.5)
    assert engine.most_in_flight == 1


def test_the_roof_is_measured_in_the_same_run(tmp_path: Path) -> None:
    made = bench(tmp_path, FakeEngine(Reply(tokens=list(range(65, 75)), delay_s=0.001)))
    assert made.roof is not None
    assert len(made.roof.readings_bytes_per_s) >= 2, "before and after"
    assert min(made.roof.readings_bytes_per_s) > 1e8
    assert made.roof.bandwidth_bytes_per_s in made.roof.readings_bytes_per_s
    assert made.figures["roof_tokens_per_s"] == pytest.approx(made.roof.tokens_per_s)
    rate, share = made.figures["decode_tokens_per_s"], made.figures["roof_share"]
    assert rate is not None
    assert share == pytest.approx(rate / made.roof.tokens_per_s)


def test_an_answer_of_another_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProaError, match="generated 3 tokens instead of 6"):
        bench(tmp_path, FakeEngine(Reply(tokens=[65, 66, 67])))


def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProaError, match="4096"):
        bench(tmp_path, FakeEngine(), LatencyOptions(prompt_tokens=5000, output_tokens=6))
