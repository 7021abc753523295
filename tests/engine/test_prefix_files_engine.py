"""Engines that keep the prefix cache in files: a restarted engine answers as one with the prefix in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from engines import finish_all, request
from prefix_engines import NATIVE, PROMPT, RUN_TOKENS, ask, start, stop, wait_until_stored
from proa.cache import files, keys
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.errors import UsageError
from quick_plan import prepare
from tiny import make_tiny

TORCH = {"dtype": "float32", "gpu": "none", "threads": 1}
SIM = {"dtype": "bfloat16", "gpu": "sim:256MiB", "gpu_experts": "3"}
GPU = {"dtype": "bfloat16", "gpu": "0", "gpu_experts": "3"}
CASES = [
    pytest.param("qwen3-moe", NATIVE, id="native"),
    pytest.param("qwen3-moe", NATIVE | {"deterministic": True}, id="deterministic"),
    pytest.param("qwen3-moe", NATIVE | {"kv_dtype": "fp8"}, id="fp8-kv"),
    pytest.param("deepseek-v3", NATIVE, id="latents"),
    pytest.param("qwen3-moe", TORCH, id="torch"),
    pytest.param("qwen3-moe", TORCH | {"deterministic": True}, id="torch-deterministic"),
    pytest.param("qwen3-moe", SIM, id="sim"),
    pytest.param("qwen3-next", NATIVE, id="states"),
    pytest.param("qwen3-next", NATIVE | {"deterministic": True}, id="states-deterministic"),
    pytest.param("qwen3-next", TORCH, id="states-torch"),
    pytest.param("qwen3-next", SIM, id="states-sim"),
    pytest.param("qwen3-moe", GPU, id="cuda", marks=pytest.mark.gpu),
    pytest.param("qwen3-moe", GPU | {"deterministic": True}, id="cuda-deterministic", marks=pytest.mark.gpu),
    pytest.param("deepseek-v3", GPU, id="cuda-latents", marks=pytest.mark.gpu),
    pytest.param("qwen3-next", GPU, id="cuda-states", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RUN_TOKENS", RUN_TOKENS)


def test_an_idle_engine_finds_what_another_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listed the folder only behind what it stored itself, so its first request after a pause was computed."""
    monkeypatch.setattr(files, "LOOK_AGAIN_S", 0.0)
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    one, other = (start(model, folder, **NATIVE) for _ in range(2))
    ask(one, "a")
    wait_until_stored(one)
    end = time.monotonic() + 20
    while not other.stats().prefix_files.stored_bytes:
        assert time.monotonic() < end
        other.keep_up()  # as the loop of a process does now and then while it has no work
        time.sleep(0.001)
    assert ask(other, "a").cached_tokens >= 320
    for engine in (one, other):
        stop(engine)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_restarted_engine_answers_with_the_same_bits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, folder = make_tiny(name, tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **options)
    computed = ask(first, "a")
    hit = ask(first, "b")
    stop(first)
    assert computed.cached_tokens == 0
    assert hit.cached_tokens >= 320
    again = start(model, folder, **options)
    restored = ask(again, "a")
    files = again.stats().prefix_files
    stop(again)
    assert restored == hit
    assert files.bad_files == 0
    assert files.restored_pages * 16 >= hit.cached_tokens
    if options.get("deterministic"):
        assert restored.logprobs == computed.logprobs


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **NATIVE)
    ask(first, "a")
    hit = ask(first, "b")
    stop(first)
    files = sorted(folder.glob("*.kv"), key=os.path.getmtime)
    assert len(files) == len(PROMPT) // RUN_TOKENS
    raw = bytearray(files[5].read_bytes())
    raw[-9] ^= 1
    files[5].write_bytes(raw)
    again = start(model, folder, **NATIVE)
    restored = ask(again, "a")
    assert restored.tokens == hit.tokens
    assert restored.cached_tokens == 5 * RUN_TOKENS
    assert again.stats().prefix_files.bad_files == 1
    stop(again)
    assert len(sorted(folder.glob("*.kv"))) == len(files)


def test_salt_model_and_kv_type_have_files_of_their_own(tmp_path: Path) -> None:
    model, other, folder = (
        make_tiny("qwen3-moe", tmp_path / "a"),
        make_tiny("qwen3-moe", tmp_path / "b"),
        tmp_path / "c",
    )
    first = start(model, folder, **NATIVE)
    ask(first, "a")
    stop(first)
    salted = start(model, folder, **NATIVE)
    assert ask(salted, "a", salt="another user").cached_tokens == 0
    assert ask(salted, "b").cached_tokens == 384
    stop(salted)
    for where, options in ((other, NATIVE), (model, NATIVE | {"kv_dtype": "fp8"}), (model, TORCH)):
        engine = start(where, folder, **options)
        assert ask(engine, "a").cached_tokens == 0
        assert engine.stats().prefix_files.foreign_files > 0
        stop(engine)


def test_no_salt_stands_for_a_prompts_length(tmp_path: Path) -> None:
    """With dynamic rotary angles the keys of a long prompt depend on its length, and are not those of a short one."""
    scaling = '{"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}'
    overrides = ("max_position_embeddings=64", f"rope_parameters={scaling}")
    engine = start(make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache", **TORCH, override_config=overrides)
    ask(engine, "short", PROMPT[:49], salt="rope:200:")
    assert ask(engine, "long", PROMPT[:200]).cached_tokens == 0
    assert ask(engine, "again", PROMPT[:200]).cached_tokens == 192
    stop(engine)


def test_a_request_that_waits_for_its_pages_can_be_aborted(tmp_path: Path) -> None:
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **NATIVE)
    ask(first, "a")
    stop(first)
    again = start(model, folder, **NATIVE)
    again.submit(request("a", PROMPT, 6))
    again.submit(request("b", PROMPT[:40], 6))
    again.step()
    assert again.scheduler.behind.busy
    assert again.abort("a")
    assert list(finish_all(again)) == ["b"]
    wait_until_stored(again)
    assert ask(again, "c").cached_tokens == 384
    stop(again)


def test_siblings_wait_for_one_restore(tmp_path: Path) -> None:
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **NATIVE)
    ask(first, "a")
    stop(first)
    again = start(model, folder, **NATIVE)
    for name in "abcd":
        again.submit(request(name, [*PROMPT, ord(name)], 2))
    events = finish_all(again)
    assert [events[name][0].cached_tokens for name in "abcd"] == [384] * 4
    assert again.stats().prefix_files.restored_pages == 384 // 16
    stop(again)


def test_computing_is_preferred_if_it_is_quicker(tmp_path: Path) -> None:
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **NATIVE)
    ask(first, "a")
    stop(first)
    again = start(model, folder, **NATIVE)
    ask(again, "short", PROMPT[:70])
    for _ in range(100):
        again._tiers.learn(1 << 30, 1.0)  # type: ignore[union-attr]
    assert ask(again, "a").cached_tokens == 64
    assert again.stats().prefix_files.refused_restores == 1
    stop(again)


def test_a_full_folder_keeps_the_latest(tmp_path: Path) -> None:
    model, folder = make_tiny("qwen3-moe", tmp_path / "model"), tmp_path / "cache"
    first = start(model, folder, **NATIVE, prefix_cache_disk=300_000)
    ask(first, "a")
    ask(first, "b", [token % 97 + 1 for token in PROMPT])
    stop(first)
    assert 0 < sum(file.stat().st_size for file in folder.iterdir()) <= 300_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_disk": None}, "--prefix-cache-disk SIZE is missing"),
        ({"prefix_cache_dir": None}, "--prefix-cache-dir PATH is missing"),
        ({"prefix_cache_disk": 1000}, "too small"),
    ],
)
def test_incomplete_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path / "model")
    with pytest.raises(UsageError, match=message):
        start(model, tmp_path, **{"prefix_cache_dir": str(tmp_path), **NATIVE, **options})


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("qwen3-next", {"prefix_cache": False}, "is off"),
        ("qwen3-moe", {"prefix_cache": False}, "the prefix cache is off"),
    ],
)
def test_the_table_says_why_there_are_no_files(name: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model")
    asked = {"prefix_cache_dir": str(tmp_path), "prefix_cache_disk": 1 << 30, "context": 64, **NATIVE, **options}
    plan = prepare(str(model), from_keywords(EngineOptions, **asked)).plan
    (row,) = (row for row in plan.decisions if row.name == "prefix cache files")
    assert (row.got, plan.prefix_files) == ("none", None)
    assert why in row.why
