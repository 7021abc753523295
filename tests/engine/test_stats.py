"""The engine's statistics: every counter has its value under its own name."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from proa.engine.engine import Engine
from proa.engine.executors.clock import Stage, StepClock
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.obs.metrics import SAMPLED
from scheduler_sim import FakeEngine, ask, make_limits

# Fields of Counters, and where Stats has them.
COUNTED = {
    "jobs": "cpu_experts.jobs", "weight_bytes": "cpu_experts.weight_bytes", "experts": "cpu_experts.needed",
    "foreseen": "cpu_experts.foreseen", "moe_s": "cpu_experts.seconds", "waiting_s": "cpu_experts.waiting_seconds",
    "gaps": "cpu_experts.gaps", "gap_s": "cpu_experts.gap_seconds", "deferred": "cpu_experts.deferred",
    "deferred_s": "cpu_experts.deferred_seconds", "looks": "residency.looks",
    "choices": "residency.choices", "hits": "residency.hits", "hit_bytes": "residency.hit_bytes",
    "missed_bytes": "residency.missed_bytes", "moved_bytes": "residency.moved_bytes",
    "lent_slots": "residency.lent_slots", "lent_bytes": "residency.lent_bytes",
}  # fmt: skip


def test_values_have_the_names_of_their_counters() -> None:
    fake, clock = FakeEngine(make_limits(), 48), StepClock()
    executor = SimpleNamespace(clock=clock, counters=lambda: NOTHING_COUNTED, spec=SimpleNamespace(ropes=()))
    runner: Any = SimpleNamespace(executor=executor)
    engine = Engine(runner, fake.scheduler, vocab=12)
    fake.submit(ask("r", [1, 2, 3], 5))
    fake.step()
    fake.submit(ask("waits", [1], 5))
    for stage in Stage:
        time.sleep(1e-3 * (1 + stage))  # no two laps are equally long
        clock.lap(stage)
    stats = engine.stats().scheduler
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
    assert (stats.pages_total, stats.pages_free, stats.pages_cached) == (48, fake.allocator.num_free, 0)
    assert 0 < stats.pages_free < 48
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (3, 0, 1)
    seconds = clock.seconds()
    values = engine.stats().values()
    assert [values[f"seconds.{stage.name.lower()}"] for stage in Stage] == list(seconds)
    assert len(set(seconds)) == len(Stage)
    assert not any(values[path] for path in COUNTED.values())

    counters = Counters(pairs=7, **{name: 100 + i for i, name in enumerate(COUNTED)})
    executor.counters = lambda: counters
    values = engine.stats().values()
    assert [values[path] for path in COUNTED.values()] == [100 + i for i in range(len(COUNTED))]
    assert {*values} <= {*SAMPLED}, "each is a metric"
