"""Engines that keep the prefix cache in RAM behind a small KV cache in VRAM: prompts that alternate are restored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import finish_all, request
from proa.cache import keys
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.executors import restore_rates
from proa.types import TokenLogprob
from quick_plan import prepare
from tiny import make_tiny

RUN_TOKENS = 32
SIM = {"dtype": "bfloat16", "gpu": "sim:256MiB", "gpu_experts": "3", "prefix_cache_ram": 16 << 20}
GPU = {"dtype": "bfloat16", "gpu": "0", "gpu_experts": "3"}
CASES = [
    pytest.param("qwen3-moe", SIM, id="sim"),
    pytest.param("qwen3-moe", SIM | {"deterministic": True}, id="sim-deterministic"),
    pytest.param("deepseek-v3", SIM, id="sim-latents"),
    pytest.param("qwen3-next", SIM, id="sim-states"),
    pytest.param("qwen3-moe", GPU, id="cuda", marks=pytest.mark.gpu),
    pytest.param("qwen3-moe", GPU | {"deterministic": True}, id="cuda-deterministic", marks=pytest.mark.gpu),
    pytest.param("qwen3-moe", GPU | {"kv_dtype": "fp8"}, id="cuda-fp8-kv", marks=pytest.mark.gpu),
    pytest.param("deepseek-v3", GPU, id="cuda-latents", marks=pytest.mark.gpu),
    pytest.param("qwen3-next", GPU, id="cuda-states", marks=pytest.mark.gpu),
]
PROMPTS = {name: [(k * i * i + 3) % 97 + 1 for i in range(389)] for name, k in (("A", 7), ("B", 11), ("C", 13))}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RUN_TOKENS", RUN_TOKENS)


@pytest.fixture(autouse=True)
def always_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models may be computed quicker than they are restored: no step is long enough to tell the rate."""
    monkeypatch.setattr(restore_rates, "LEAST_PREFILL_TOKENS", 1 << 30)


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    cached_tokens: int


def start(model: Path, **options: Any) -> Engine:
    """An engine whose KV cache holds one of the prompts."""
    asked = {
        "context": 416, "max_running": 1, "max_batch_tokens": 64, "threads": 2, "cpu_binding": "none", **options,
    }  # fmt: skip
    plan = prepare(str(model), from_keywords(EngineOptions, **asked)).plan
    return load_engine(plan, lambda loading: None)[0]


def ask(engine: Engine, name: str, **wishes: object) -> Answer:
    engine.submit(msgspec.structs.replace(request(name, PROMPTS[name], 6, logprobs=3), **wishes))
    events = finish_all(engine)[name]
    cached = next(event.cached_tokens for event in events if event.cached_tokens is not None)
    return Answer([t for e in events for t in e.tokens], [p for e in events for p in e.logprobs or ()], cached)


def wait_until_stored(engine: Engine) -> None:
    end = time.monotonic() + 20
    while engine.keep_up():
        assert time.monotonic() < end
        time.sleep(0.001)
    engine.scheduler.check()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_prompts_that_alternate_come_from_ram(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model")
    engine = start(model, **options)
    first = ask(engine, "A")
    wait_until_stored(engine)
    hit = ask(engine, "A")  # in VRAM
    assert engine.stats().prefix_ram.restored_pages == 0
    for other in "BC":
        assert ask(engine, other).cached_tokens == 0
        wait_until_stored(engine)
    again = ask(engine, "A")
    wait_until_stored(engine)
    stats = engine.stats()
    salted = ask(engine, "A", salt="another user")
    wait_until_stored(engine)
    engine.settle()
    assert (first.cached_tokens, hit.cached_tokens, again.cached_tokens) == (0, 384, 384)
    assert (again.tokens, again.logprobs) == (hit.tokens, hit.logprobs)
    assert salted.cached_tokens == 0
    if options.get("deterministic"):
        assert again.logprobs == first.logprobs
    assert stats.prefix_ram.restored_pages >= 384 // 16 - 1  # a page may be left in VRAM
    assert stats.prefix_ram.restored_bytes > 0
    assert engine._tiers is not None
    assert stats.prefix_ram.written_runs == 3 * (384 // RUN_TOKENS + engine._tiers.state_parts)
    assert (engine._tiers.state_parts > 0) == (name == "qwen3-next")
    assert stats.prefix_ram.stored_bytes > 0
    assert stats.prefix_files.restored_pages == 0


def test_a_tier_that_holds_two_prompts_evicts_the_third(tmp_path: Path) -> None:
    """LRU over runs: of A, B and C only the last two are there, then A replaces B."""
    model = make_tiny("qwen3-moe", tmp_path / "model")
    plenty = start(model, **SIM)
    ask(plenty, "A")
    wait_until_stored(plenty)
    each = plenty.stats().prefix_ram.stored_bytes
    plenty.settle()
    engine = start(model, **SIM | {"prefix_cache_ram": 2 * each})
    for name, cached in (("A", 0), ("B", 0), ("C", 0), ("B", 384), ("A", 0), ("B", 384)):
        assert ask(engine, name).cached_tokens == cached, name
        wait_until_stored(engine)
        assert engine.stats().prefix_ram.stored_bytes <= 2 * each
    assert engine.stats().prefix_ram.evicted_runs > 0
    engine.settle()


def test_with_files_too_ram_is_first_and_files_survive(tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path / "model")
    both = SIM | {"prefix_cache_dir": str(tmp_path / "cache"), "prefix_cache_disk": 1 << 30}
    first = start(model, **both)
    for name in "AB":
        ask(first, name)
        wait_until_stored(first)
    assert ask(first, "A").cached_tokens == 384
    stats = first.stats()
    wait_until_stored(first)
    first.settle()
    assert stats.prefix_ram.restored_pages >= 23  # a page may be left in VRAM
    assert stats.prefix_files.restored_pages == 0
    assert (stats.prefix_ram.written_runs, stats.prefix_files.written_files) == (24, 24)
    again = start(model, **both)
    for name in "ABA":
        assert ask(again, name).cached_tokens == 384
        wait_until_stored(again)
    stats = again.stats()
    again.settle()
    assert 23 <= stats.prefix_ram.restored_pages <= 24
    assert 47 <= stats.prefix_files.restored_pages <= 48
