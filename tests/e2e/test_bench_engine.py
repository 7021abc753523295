"""`proa bench latency` with a real engine process and a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import make_tokenizer
from proa.bench.latency import LatencyOptions, run
from proa.config.options import EngineOptions, MachineOptions, ModelOptions
from tiny import make_tiny

pytestmark = pytest.mark.usefixtures("forked_engines")


@pytest.mark.alone
def test_a_real_engine_is_timed_beside_its_roof(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    make_tokenizer(folder, vocab_size=256)
    engine = EngineOptions(machine=MachineOptions(threads=1))
    options = LatencyOptions(model=str(folder), prompt_tokens=64, output_tokens=8, runs=2, engine=engine)
    result = run(options)
    figures = {name: value for name, value in result.figures.items() if value is not None}
    assert result.roof is not None
    assert figures["cached_prompt_tokens"] == 0  # prompts differ in their first page
    assert figures["ttft_ms_median"] > 0
    stages = [figures[f"{stage}_us_per_step"] for stage in ("schedule", "inputs", "sample", "publish", "program")]
    assert min(stages) > 0
    assert max(*stages[:-1]) < figures["host_us_per_step"] < sum(stages)
    assert 0 < figures["roof_share"] < 1
    assert figures["decode_tokens_per_s"] < figures["roof_tokens_per_s"]


@pytest.mark.alone
def test_predicted_rates_stand_beside_measured_ones(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    make_tokenizer(folder, vocab_size=256)
    engine = EngineOptions(model=ModelOptions(dtype="bfloat16"), machine=MachineOptions(threads=1))
    options = LatencyOptions(model=str(folder), prompt_tokens=64, output_tokens=8, runs=2, engine=engine)
    figures = {name: value for name, value in run(options).figures.items() if value is not None}
    assert figures["decode_tokens_per_s"] > 0  # of so small a model, a busy machine may deliver tokens in bursts
    assert 0 < figures["predicted_decode_tokens_per_s"] < figures["roof_tokens_per_s"]
    assert figures["predicted_prefill_tokens_per_s"] > figures["predicted_decode_tokens_per_s"]
