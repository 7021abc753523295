"""After long, short and cancelled prompts, streamed and restored ones among them, a planned engine holds nothing: every
page, state slot, slot of experts and the ring is free again, no step is under way, and the next answer has the bits of
a new engine's. Memory is measured by tests/e2e/test_soak.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engines import finish_all, request
from hybrid_engines import hybrid_of
from prefix_engines import wait_until_stored
from proa.cache import keys
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.executors import restore_rates
from proa.engine.executors.recorded import RecordedExecutor
from proa.hybrid.model import HybridModel
from proa.types import TokenEvent
from quick_plan import prepare
from tiny import make_tiny

CONTEXT, RUNNING, RUN_TOKENS = 320, 4, 32
SHARED = 261  # tokens of a beginning that prompts share: recurrent states are copied after 256
REQUESTS, LEAVING = 30, 0.1  # of one traffic; how often a request is cancelled before a step
KV_BYTES = {"qwen3-moe": 768, "qwen3-next": 256}  # of a token
TIERS = {"prefix_cache_ram": 8 << 20}
STATIC = {"gpu_experts": "3", "prefill": "stream", "expert_placement": "uniform", "co_fetch": "off", **TIERS}
MOVING = {**STATIC, "expert_placement": "dynamic", "co_fetch": "auto"}
SIM, GPU = {"gpu": "sim:256MiB"}, {"gpu": "0"}
CASES = [
    pytest.param("qwen3-moe", {"gpu": "none"}, id="cpu"),
    pytest.param("qwen3-next", {"gpu": "none"}, id="cpu, states"),
    pytest.param("qwen3-moe", SIM | STATIC, id="sim"),
    pytest.param("qwen3-next", SIM | STATIC, id="sim, states"),
    pytest.param("qwen3-moe", SIM | MOVING, id="sim, moving"),
    pytest.param("qwen3-next", SIM | MOVING, id="sim, moving, states"),
    pytest.param("qwen3-next", GPU | STATIC, id="cuda, states", marks=pytest.mark.gpu),
    pytest.param("qwen3-next", GPU | MOVING, id="cuda, moving, states", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def always_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are short, and restored even if a tiny model is computed quicker."""
    monkeypatch.setattr(keys, "RUN_TOKENS", RUN_TOKENS)
    monkeypatch.setattr(restore_rates, "LEAST_PREFILL_TOKENS", 1 << 30)


def start(model: Path, family: str, files: Path, options: dict[str, Any]) -> Engine:
    """Its KV cache holds little more than one full context, so tiers are read."""
    asked = {
        "dtype": "bfloat16", "context": CONTEXT, "max_running": RUNNING, "max_batch_tokens": 64, "threads": 2,
        "cpu_binding": "none", "kv_memory": 2 * CONTEXT * KV_BYTES[family], "prefix_cache_dir": str(files),
        "prefix_cache_disk": 1 << 30, **options,
    }  # fmt: skip
    return load_engine(prepare(str(model), from_keywords(EngineOptions, **asked)).plan, lambda loading: None)[0]


def traffic(engine: Engine, seed: int) -> int:
    """Send prompts of 1 to 270 tokens, half of them with one of three beginnings; cancel some at a random moment.
    Returns how many were cancelled during their prompt."""
    rng = Random(seed)
    shared = [[rng.randrange(3, 250) for _ in range(SHARED)] for _ in range(3)]
    waiting, here, early = list(range(REQUESTS)), dict[str, bool](), 0  # whether it has a token
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.3:
            name = f"{seed} {waiting.pop()}"
            tokens = [rng.randrange(3, 250) for _ in range(rng.choice((1, 5, 90, 250)))]
            if rng.random() < 0.5:
                tokens = [*rng.choice(shared)[: rng.choice((rng.randrange(SHARED), SHARED, SHARED))], *tokens[:5]]
            engine.submit(request(name, tokens, rng.randrange(1, 30)))
            here[name] = False
        if here and rng.random() < LEAVING:
            name = rng.choice(list(here))
            early += engine.abort(name) and not here.pop(name)
        note(engine.step(), here)
        engine.scheduler.check()
        if engine.stalls:
            time.sleep(0.001)
    return early


def alternate(engine: Engine) -> None:
    """Prompts that the KV cache does not hold together, each twice: the second time they are restored."""
    rng = Random(7)
    texts = [[rng.randrange(3, 250) for _ in range(SHARED)] for _ in range(3)]
    for number, text in enumerate(texts * 2):
        engine.submit(request(f"again {number}", text, 2))
        finish_all(engine)
        wait_until_stored(engine)


def give_up(engine: Engine) -> None:
    """Cancel a prompt that is alone, after each number of steps up to its end."""
    rng, steps, ended = Random(8), 0, False
    while not ended:
        name = f"given up {steps}"
        engine.submit(request(name, [rng.randrange(3, 250) for _ in range(SHARED)], 1))
        ended = any(event.finish for _ in range(steps) if engine.has_work for event in engine.step())
        engine.abort(name)
        finish_all(engine)
        wait_until_stored(engine)
        check_free(engine)
        steps += 1
    assert steps > 2


def note(events: list[TokenEvent], here: dict[str, bool]) -> None:
    for event in events:
        if event.finish is not None:
            here.pop(event.id, None)
        elif event.id in here and event.tokens:
            here[event.id] = True


def check_free(engine: Engine) -> None:
    stats, scheduler = engine.stats().scheduler, engine.scheduler
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert sorted(scheduler._free_states) == list(range(scheduler.limits.num_slots))
    assert not engine._turns.busy
    executor: Any = engine.runner.executor
    assert executor._unfinished == []
    if (hybrid := session(engine)) is not None:
        assert hybrid._launched == hybrid._ended
        assert hybrid.streaming is not None
        assert not hybrid.streaming.under_way
        assert hybrid.streaming._later is None


def slots(engine: Engine) -> list[int]:
    """Addresses of the slots of experts: named by the tables, spare, still read by a step, or the target of a move."""
    hybrid = session(engine)
    if hybrid is None or hybrid.moves is None:
        return []
    moves = hybrid.moves
    named = [int(at) for at in moves.tables._addresses[:, 0].flatten() if at]
    spare = [slot.up.data_ptr() for slots in moves._spare.values() for slot in slots]
    left = [left.slot.address for left in moves._left]
    moving = [move.slot.up.data_ptr() for move in moves._moves if move.came is None]
    return sorted(named + spare + left + moving)


def session(engine: Engine) -> HybridModel | None:
    return None if isinstance(engine.runner.executor, RecordedExecutor) else hybrid_of(engine)


@pytest.mark.parametrize(("family", "options"), CASES)
def test_nothing_is_left(family: str, options: dict[str, Any], tmp_path: Path, sampled: bool) -> None:
    model = make_tiny(family, tmp_path / "model")
    engine = start(model, family, tmp_path / "files", options)
    room = slots(engine)
    early = sum(traffic(engine, seed) for seed in range(1 if sampled else 2))
    alternate(engine)
    give_up(engine)
    assert slots(engine) == room
    stats = engine.stats()
    assert early > 0
    assert stats.prefix_files.restored_pages + stats.prefix_ram.restored_pages > 0
    assert (stats.prefix_files.bad_files, stats.prefix_files.failed_writes) == (0, 0)
    assert bool(stats.prefill.streamed) == (options["gpu"] != "none")
    assert (stats.residency.moved_bytes > 0) == (options.get("expert_placement") == "dynamic")
    if options.get("expert_placement") != "dynamic":
        new = start(model, family, tmp_path / "other", options)
        assert answer(engine) == answer(new)
        new.settle()
    engine.settle()


def answer(engine: Engine) -> list[tuple[int, float]]:
    """Tokens and log-probabilities after a prompt that no request has sent."""
    engine.submit(request("last", [7 * i % 241 + 3 for i in range(150)], 6, logprobs=1))
    events = finish_all(engine)["last"]
    tokens = [token for event in events for token in event.tokens]
    return list(zip(tokens, [of.logprob for event in events for of in event.logprobs or ()], strict=True))
