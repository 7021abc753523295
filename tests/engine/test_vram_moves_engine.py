"""A planned engine whose idle KV pages hold experts (--vram-moves): once a long conversation has ended, its pages are
filled with experts; the next long one takes them back without preempting a request, and all answers are those of an
engine without the option."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engines import request
from hybrid_engines import hybrid_of
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.ipc import Ready
from proa.engine.scheduling import lending
from proa.errors import UsageError
from proa.plan.plan import Plan
from quick_plan import prepare
from tiny import make_tiny

CONTEXT, LONG, SHORT = 2048, 1900, 60
DEVICES = [pytest.param("sim:256MiB", id="sim"), pytest.param("0", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "IDLE_S", 0.02)
    monkeypatch.setattr(lending, "LOOK_S", 0.005)
    monkeypatch.setattr(lending, "STORED_S", 0.05)


def planned(model: Path, gpu: str, **options: Any) -> Plan:
    asked = {
        "dtype": "bfloat16", "context": CONTEXT, "max_running": 2, "max_batch_tokens": 128, "threads": 2,
        "cpu_binding": "none", "gpu": gpu, "gpu_experts": "3", "co_fetch": "off", "prefix_cache": False,
        "plan_trial": "off", "kv_memory": CONTEXT * 768, **options,
    }  # fmt: skip
    return prepare(str(model), from_keywords(EngineOptions, **asked)).plan


def start(model: Path, gpu: str, **options: Any) -> tuple[Engine, Ready]:
    return load_engine(planned(model, gpu, **options), lambda loading: None)


def stop(engine: Engine) -> None:
    """Copies end before memory is freed."""
    engine.settle()
    hybrid_of(engine).close()


@dataclass
class Answers:
    """Tokens and their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def answers(engine: Engine, *asked: tuple[str, int, int]) -> dict[str, Answers]:
    """Answer requests at the same time. asked: (name, tokens of the prompt, of the answer)."""
    found = {name: Answers() for name, _, _ in asked}
    for name, tokens, count in asked:
        rng = Random(name.split()[0])
        prompt = [rng.randrange(3, 250) for _ in range(tokens)]
        engine.submit(request(name, prompt, count, logprobs=0))
    while engine.has_work:
        for event in engine.step():
            assert not event.error
            found[event.id].tokens += event.tokens
            found[event.id].logprobs += [one.logprob for one in event.logprobs or ()]
        if engine.stalls:
            time.sleep(0.001)
        engine.scheduler.check()
    return found


def rest(engine: Engine) -> int:
    """Let an idle engine lend pages, until the number of slots stays the same. Returns it."""
    last, since = -1, time.perf_counter()
    while time.perf_counter() - since < 0.3:
        engine.keep_up()
        engine.scheduler.check()
        slots = engine.stats().residency.lent_slots
        if slots != last:
            last, since = slots, time.perf_counter()
        time.sleep(0.001)
    return last


def check_equal(got: Answers, wanted: Answers) -> None:
    """Assert equal tokens up to the first that rounding decides: an expert on the other device is summed in another
    order."""
    assert len(got.tokens) == len(wanted.tokens)
    for mine, theirs, one, other in zip(got.tokens, wanted.tokens, got.logprobs, wanted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=0.05)
        if mine != theirs:
            return


@pytest.mark.parametrize("gpu", DEVICES)
def test_pages_move_between_kv_and_experts(gpu: str, tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path, max_position_embeddings=CONTEXT)
    asked = [("long", LONG, 20)], [("a", SHORT, 60), ("b", SHORT, 60)], [("long again", LONG, 20)], [("c", SHORT, 20)]
    plain, _ = start(model, gpu)
    wanted = {name: answer for requests in asked for name, answer in answers(plain, *requests).items()}
    assert plain.stats().residency.lent_slots == 0
    stop(plain)

    engine, ready = start(model, gpu, vram_moves="on")
    assert any(row.name == "lent KV pages" and "each hold" in row.why for row in ready.decisions)
    got = answers(engine, *asked[0])
    slots = rest(engine)
    assert slots > 8
    moves = hybrid_of(engine).moves
    assert moves is not None
    for layer in range(len(moves.layers)):
        assert len(moves.resident(layer)) > 3, "more than the plan put there"
    got |= answers(engine, *asked[1])
    assert engine.stats().residency.lent_slots > 0, "short requests leave them there"
    got |= answers(engine, *asked[2])
    assert engine.stats().residency.lent_slots < slots
    assert rest(engine) == slots, "and again"
    got |= answers(engine, *asked[3])
    stats = engine.stats().scheduler
    assert stats.preemptions == 0
    assert stats.pages_free == stats.pages_total
    for name, answer in wanted.items():
        check_equal(got[name], answer)
    stop(engine)


@pytest.mark.seldom
@pytest.mark.parametrize("gpu", DEVICES)
def test_decode_grows_over_lent_pages(gpu: str, tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path, max_position_embeddings=CONTEXT)
    asked = ("grows", 100, 900), ("beside", 40, 900)
    plain, _ = start(model, gpu)
    wanted = answers(plain, *asked)
    stop(plain)
    engine, _ = start(model, gpu, vram_moves="on")
    before = rest(engine)
    got = answers(engine, *asked)
    stats = engine.stats()
    assert stats.scheduler.preemptions == 0
    assert stats.residency.lent_slots < before
    for name, answer in wanted.items():
        check_equal(got[name], answer)
    stop(engine)


@pytest.mark.parametrize("gpu", DEVICES)
def test_prefixes_that_ram_holds_make_room(gpu: str, tmp_path: Path) -> None:
    """A conversation's pages are cached at its end. Once RAM has copies, its pages are lent, and restored later."""
    model = make_tiny("qwen3-moe", tmp_path, max_position_embeddings=CONTEXT)
    options = {"prefix_cache": True, "prefix_cache_ram": 64 << 20}
    engine, _ = start(model, gpu, vram_moves="on", **options)
    first = answers(engine, ("long", LONG, 20))["long"]
    cached = engine.stats().scheduler.pages_cached
    assert cached > LONG // 16 - 2
    assert rest(engine) > 4
    assert engine.stats().scheduler.pages_cached < cached
    again = answers(engine, ("long again", LONG, 20))["long again"]
    check_equal(again, first)
    assert engine.stats().scheduler.preemptions == 0
    stop(engine)


def test_where_pages_cannot_be_lent(tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path / "moe", max_position_embeddings=CONTEXT)
    for options, why in (
        ({"deterministic": True}, "deterministic"),
        ({"expert_placement": "uniform"}, "placement is static"),
        ({"gpu_experts": "all"}, "none can swap"),
    ):
        with pytest.raises(UsageError, match=why):
            planned(model, "sim:256MiB", vram_moves="on", **options)
    with pytest.raises(UsageError, match="no routed experts"):
        planned(
            make_tiny("qwen3", tmp_path / "dense", max_position_embeddings=CONTEXT),
            "sim:256MiB",
            vram_moves="on",
            gpu_experts="auto",
        )
    with pytest.raises(UsageError, match="needs a GPU"):
        planned(model, "none", vram_moves="on", gpu_experts="auto")


def test_a_pool_too_small_for_a_lot_says_so(tmp_path: Path) -> None:
    model = make_tiny("qwen3-moe", tmp_path, max_position_embeddings=CONTEXT)
    engine, ready = start(model, "sim:256MiB", vram_moves="on", context=16, max_running=1, kv_memory=16 * 768)
    (row,) = (row for row in ready.decisions if row.name == "lent KV pages")
    assert (row.got, row.why) == ("none", "6 pages would hold an expert, and the KV cache has 1")
    assert len(answers(engine, ("a", 5, 5))["a"].tokens) == 5
    stop(engine)
