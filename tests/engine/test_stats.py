"""What the engine tells of itself: every value under its own name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from proa.engine.engine import Engine
from proa.engine.executors.clock import Stage, StepClock
from proa.native.doorbell import NOTHING_COUNTED, Counters
from scheduler_sim import FakeEngine, ask, make_limits

# Fields of Counters, and what Stats calls them.
COUNTED = {
    "jobs": "cpu_jobs", "weight_bytes": "cpu_weight_bytes", "experts": "cpu_experts_needed",
    "foreseen": "cpu_experts_foreseen", "moe_s": "cpu_experts_seconds", "waiting_s": "cpu_waiting_seconds",
    "gaps": "cpu_gaps", "gap_s": "cpu_gap_seconds",
    "looks": "expert_looks", "choices": "expert_choices", "hits": "expert_hits", "hit_bytes": "expert_hit_bytes",
    "missed_bytes": "expert_missed_bytes", "moved_bytes": "expert_moved_bytes",
}  # fmt: skip


def test_what_is_counted_stands_under_its_name() -> None:
    fake, clock = FakeEngine(make_limits(), 48), StepClock()
    executor = SimpleNamespace(clock=clock, counters=lambda: NOTHING_COUNTED, spec=SimpleNamespace(ropes=()))
    runner: Any = SimpleNamespace(executor=executor)
    engine = Engine(runner, fake.scheduler, vocab=12)
    fake.submit(ask("r", [1, 2, 3], 5))
    fake.step()
    fake.submit(ask("waits", [1], 5))
    for stage in Stage:
        clock.lap(stage)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert (stats.pages_total, stats.pages_free, stats.pages_cached) == (48, fake.allocator.num_free, 0)
    assert 0 < stats.pages_free < 48
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (3, 0, 1)
    seconds = clock.seconds()
    assert [getattr(stats, f"{stage.name.lower()}_seconds") for stage in Stage] == list(seconds)
    assert len(set(seconds)) == len(Stage)
    assert not any(getattr(stats, name) for name in COUNTED.values())

    counters = Counters(pairs=7, **{name: 100 + i for i, name in enumerate(COUNTED)})
    executor.counters = lambda: counters
    stats = engine.stats()
    assert [getattr(stats, name) for name in COUNTED.values()] == [100 + i for i in range(len(COUNTED))]
