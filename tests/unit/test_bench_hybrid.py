"""`proa bench hybrid`: model shapes, computation of figures, options, table."""

from __future__ import annotations

import asyncio
import io
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from rich.console import Console

from proa.bench.gpu_rates import measure_gpu
from proa.bench.hybrid import HybridEngineOptions, HybridOptions, answer_tokens, case_of, limit_notes
from proa.bench.hybrid_ask import run_requests
from proa.bench.hybrid_figures import (
    DecodeInterval,
    Moment,
    Rates,
    StepBytes,
    best_bytes,
    common_interval,
    dense_bytes,
    expected_bytes,
    expected_distinct,
    figures_of,
    hit_figures,
    median_interval,
    placed_bytes,
    placed_figures,
    roof_tokens_per_s,
    split_ms,
    trace_of,
)
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.hybrid_table import render_hybrid
from proa.bench.limit import RamReadings
from proa.bench.prompts import random_prompts
from proa.bench.result import result
from proa.config.options import GpuOptions
from proa.engine.processes.handle import EngineHandle
from proa.engine.stats import CpuExpertStats, ResidencyStats, SchedulerStats, Stats, StepSeconds
from proa.errors import ResourceError, UsageError
from proa.models.families import declare
from proa.models.ranks import CPU
from proa.models.spec import Attention, GatedDeltaNet, Moe, Router
from proa.plan.plan import GpuPlan, VramBudget
from proa.types import EngineRequest, TokenEvent
from proa.weights.frequencies import frequencies
from quick_plan import ram_of

TINY = MODEL_SHAPES["tiny"]
TINY_SPEC = declare(TINY.config()).spec
TINY_EXPERT_BYTES = 3 * 64 * 32 * 2  # gate, up, down in bfloat16; nothing is padded
DENSE_BYTES = 12345  # that a token reads, as planned
TINY_KV_BYTES = 2 * 2 * 2 * 16 * 2  # a token: keys and values of 2 layers, 2 heads of 16, bfloat16


def gpu_plan(*resident: int) -> GpuPlan:
    nothing = dict.fromkeys(VramBudget.__struct_fields__, 0) | {"dense_read_bytes": DENSE_BYTES}
    return GpuPlan(
        index=None, name="simulated", vram=VramBudget(**nothing), placement="uniform", blocks=(0, 1),
        expert_bytes=(TINY_EXPERT_BYTES,) * 2, owners=tuple((*[0] * n, *[CPU] * (8 - n)) for n in resident),
    )  # fmt: skip


def moment(time_s: float, **counters: Any) -> Moment:
    """counters: by their names in the parts of Stats, those of CPU experts with "cpu_" before them."""
    kinds = (("", SchedulerStats), ("", StepSeconds), ("cpu_", CpuExpertStats), ("", ResidencyStats))
    parts = [
        kind(**{n: counters.pop(prefix + n) for n in kind.__struct_fields__ if prefix + n in counters})
        for prefix, kind in kinds
    ]
    assert not counters
    return Moment(time_s, Stats(*parts))


def test_events_that_arrive_together_keep_their_own_step_times() -> None:
    """Events of several steps may arrive together if the benchmark's process got no CPU time."""

    class Late:
        stats = Stats()

        async def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
            for i in range(request.sampling.max_tokens):
                self.stats = Stats(
                    SchedulerStats(steps=i, generated_tokens=i), StepSeconds(program=0.09 * i, publish=0.01 * i)
                )
                yield TokenEvent(id=request.id, tokens=[7], finish="length" if i == 12 else None)

    (answer,) = asyncio.run(run_requests(cast(EngineHandle, Late()), [[1, 2]], 13))
    interval = common_interval([answer.moments])
    assert interval is not None
    assert (interval.steps, interval.tokens_per_s) == (9, pytest.approx(10))


@pytest.mark.parametrize(
    ("name", "parameters", "active", "expert_bytes"),
    [("qwen3-30b-a3b", 30.5e9, 3.3e9, 9 << 20), ("minimax-m2", 228.7e9, 10e9, 27 << 20), ("deepseek-v3", 671.03e9,
      37e9, 84 << 20), ("deepseek-v2-lite", 15.706e9, 2.5e9, 17301504), ("qwen3-next-80b-a3b", 79.67e9,
      3.56e9, 6 << 20), ("glm-4.5-air", 106.85e9, 12.8e9, 33 << 20),
     ("gpt-oss-120b", 116.83e9, 5.1e9, 3 * 2880 * 2880 * 2)],
)  # fmt: skip
def test_shapes_are_those_of_the_models(name: str, parameters: float, active: float, expert_bytes: int) -> None:
    shape = MODEL_SHAPES[name]
    spec = declare(shape.config()).spec
    assert spec.num_params == pytest.approx(parameters, rel=0.02)
    assert spec.num_active_params == pytest.approx(active, rel=0.1)
    assert len(declare(shape.cut(3).config()).spec.blocks) == 3
    assert 3 * shape.hidden * shape.width * 2 == expert_bytes
    with pytest.raises(UsageError, match=f"has {shape.layers}"):
        shape.cut(shape.layers + 1)


def test_shapes_route_as_the_models_do() -> None:
    routers = {name: {b.ffn.router for b in declare(shape.config()).spec.blocks if isinstance(b.ffn, Moe)}
               for name, shape in MODEL_SHAPES.items()}  # fmt: skip
    assert routers["qwen3-30b-a3b"] == {Router("softmax", True)}
    assert routers["minimax-m2"] == {Router("sigmoid", True, correction=True)}
    assert routers["glm-4.5-air"] == {Router("sigmoid", True, correction=True, epsilon=1e-20)}


def test_the_shape_of_qwen3_next_is_its_own() -> None:
    spec = declare(MODEL_SHAPES["qwen3-next-80b-a3b"].config()).spec
    assert spec.num_params == 79_674_391_296
    assert [isinstance(block.mixer, Attention) for block in spec.blocks] == [False, False, False, True] * 12
    assert spec.blocks[0].mixer == GatedDeltaNet(2048, 16, 32, 128, 128, 4)
    gpu = msgspec.structs.replace(gpu_plan(), expert_bytes=(6 << 20,) * 48, owners=((CPU,) * 512,) * 48)
    dense = dense_bytes(spec, gpu, 2, 100)
    assert dense == gpu.vram.dense_read_bytes + 2 * (100 * 24576 + 2 * spec.state_bytes_per_sequence(2))


@pytest.mark.parametrize(("experts", "top_k", "requests"), [(3, 1, 2), (4, 2, 3), (5, 3, 2), (5, 2, 1), (4, 4, 2)])
def test_expected_experts_are_the_mean_over_all_routings(experts: int, top_k: int, requests: int) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    routings = list(itertools.product(choices, repeat=requests))
    mean = sum(len(set().union(*routing)) for routing in routings) / len(routings)
    assert expected_distinct(frequencies("uniform", experts, top_k), requests) == pytest.approx(mean)


def test_hot_experts_are_shared_by_more_requests() -> None:
    for router in ("uniform", "zipf"):
        assert expected_distinct(frequencies(router, 128, 8), 1) == pytest.approx(8)
    assert expected_distinct([0.5, 0.25, 0.25], 2) == pytest.approx(0.75 + 2 * (1 - 0.75**2))
    uniform, zipf = (expected_distinct(frequencies(router, 128, 8), 8) for router in ("uniform", "zipf"))
    assert uniform == pytest.approx(128 * (1 - (15 / 16) ** 8))
    assert 8 < zipf < uniform


def test_expected_bytes_of_a_step() -> None:
    dense = dense_bytes(TINY_SPEC, gpu_plan(4, 2), 2, 100.5)
    assert dense == DENSE_BYTES + 2 * 100.5 * TINY_KV_BYTES
    assert dense_bytes(TINY_SPEC, gpu_plan(4, 2), 2, 100.5, 1) == DENSE_BYTES + 100.5 * TINY_KV_BYTES, "fp8"
    read = expected_bytes(TINY_SPEC, gpu_plan(4, 2), "uniform", 2, dense, cpu_bytes=777.0)
    assert read.dense == dense
    assert read.cpu == 777
    assert read.resident == pytest.approx((4 + 2) * (1 - 0.75**2) * TINY_EXPERT_BYTES)


def test_co_fetched_experts_count_as_ram_bytes() -> None:
    fetching = msgspec.structs.replace(gpu_plan(4, 2), co_fetch=True)
    alone = expected_bytes(TINY_SPEC, fetching, "uniform", 1, DENSE_BYTES, cpu_bytes=1.0)
    missed = 2 * 2 * TINY_EXPERT_BYTES - alone.resident
    assert alone.cpu == pytest.approx(missed)
    two = expected_bytes(TINY_SPEC, fetching, "uniform", 2, DENSE_BYTES, cpu_bytes=1.0)
    assert two.cpu == pytest.approx(2 * 8 * (1 - 0.75**2) * TINY_EXPERT_BYTES - two.resident)


COUNTED = {"steps": 4, "looks": 6, "choices": 16, "hits": 12, "hit_bytes": 400,
           "missed_bytes": 200, "moved_bytes": 80}  # fmt: skip


def test_hit_rate_without_a_trace_is_zero_or_one() -> None:
    every = 2 * expected_distinct(frequencies("zipf", 8, 2), 3) * TINY_EXPERT_BYTES
    none, both = (expected_bytes(TINY_SPEC, gpu_plan(n, n), "zipf", 3, 1, cpu_bytes=5.0) for n in (0, 8))
    assert (none.resident, both.resident) == (0, pytest.approx(every))
    assert (none.cpu, both.cpu) == (5, 5)
    rates = [hit_figures(an_interval(), None, gpu_plan(n, n)) for n in (0, 8)]
    assert rates == [{"hit_rate": 0, "best_hit_rate": 0}, {"hit_rate": 1, "best_hit_rate": 1}]


@pytest.mark.parametrize("arrived", [1.0, 0.75, 1.25], ids=["all", "a step later", "with a step before"])
def test_placed_bytes_of_selected_experts(arrived: float) -> None:
    """The counters of an interval's steps may lag, so bytes are divided by the counted steps."""
    counted = {name: int(count * arrived) for name, count in COUNTED.items() if name != "steps"}
    interval = DecodeInterval(moment(0.0), moment(1.0, steps=4, **counted))
    one, two = (placed_bytes(interval, gpu_plan(4, 2), requests, 7.0, 4) for requests in (1, 2))
    assert (one.dense, one.resident, one.cpu) == (7, 3 * TINY_EXPERT_BYTES, TINY_EXPERT_BYTES), "each choice its own"
    assert (two.dense, two.resident, two.cpu) == (7, 100, 50)


def test_hit_rate_and_best_hit_rate_of_a_trace() -> None:
    """The interval has 4 of 6 looks; one of the two layers has two slots, the other one."""
    trace = np.zeros((6, 2, 8), np.int64)
    trace[:2, :, 7] = 100  # before the interval
    trace[2:, 0, :3] = [[1, 1, 0], [1, 0, 1], [1, 1, 0], [1, 1, 0]]
    trace[2:, 1, 4:6] = [[1, 1]] * 4
    end = {**COUNTED, "looks": 6}
    interval = DecodeInterval(moment(0.0, looks=2), moment(1.0, **end, generated_tokens=4))
    inside = trace_of(interval, trace)
    assert len(inside) == 4
    gpu, rates = gpu_plan(2, 1), Rates(hbm=1e6, ram=1e5)
    placed = placed_bytes(interval, gpu, 1, 0.0, 4)
    figures = hit_figures(interval, inside, gpu) | placed_figures(interval, gpu, 1, placed, rates)
    assert figures["hit_rate"] == 12 / 16
    assert figures["best_hit_rate"] == (4 + 3 + 4) / 16
    assert figures["moved_bytes_per_step"] == 20
    assert figures["roof_as_placed_tokens_per_s"] == pytest.approx(1 / max(placed.resident / 1e6, placed.cpu / 1e5))
    best = best_bytes(inside, gpu, 1, 5.0, 4)
    assert (best.dense, best.resident, best.cpu) == (5, 11 / 4 * TINY_EXPERT_BYTES, 5 / 4 * TINY_EXPERT_BYTES)
    shared = best_bytes(inside, gpu, 2, 5.0, 4)
    assert (shared.resident, shared.cpu) == (best.resident, best.cpu), "no expert is chosen twice in a look"


@pytest.mark.parametrize(
    ("resident", "cpu", "step_s"),
    [(4e9, 0, 3.0), (4e9, 5e9, 3.0), (4e9, 15e9, 4.0), (0, 5e9, 2.0)],
    ids=["GPU only", "the GPU is longer", "the CPU is longer", "CPU only"],
)
def test_the_roof_is_the_longer_of_both(resident: float, cpu: float, step_s: float) -> None:
    read, rates = StepBytes(dense=2e9, resident=resident, cpu=cpu), Rates(hbm=2e9, ram=5e9)
    assert roof_tokens_per_s(read, rates, 6) == pytest.approx(6 / step_s)


@pytest.mark.parametrize(("requests", "cpu", "step_s"), [(1, 15e9, 3.0), (4, 5e9, 1.5), (5, 15e9, 4.0)])
def test_read_ahead_raises_the_roof_for_few_rows(requests: int, cpu: float, step_s: float) -> None:
    """Experts are predicted in steps of up to four rows; a roof without that could be exceeded. Dense weights take 1 s
    here."""
    read, rates = StepBytes(dense=2e9, resident=1e9, cpu=cpu), Rates(hbm=2e9, ram=5e9)
    assert roof_tokens_per_s(read, rates, requests, read_ahead=True) == pytest.approx(requests / step_s)


def test_the_common_interval_starts_with_the_last_request() -> None:
    first = [moment(1.0, steps=10), moment(2.0, steps=12), moment(9.0, steps=20)]
    last = [moment(3.0, steps=14), moment(8.0, steps=19), moment(10.0, steps=21)]
    interval = common_interval([first, last])
    assert interval == DecodeInterval(last[0], first[2])
    assert (interval.steps, interval.step_s) == (6, 1.0)
    assert common_interval([first[:1], last]) is None
    assert common_interval([first, first]) == DecodeInterval(first[0], first[2])


def test_the_run_of_median_rate_is_reported() -> None:
    intervals = [DecodeInterval(moment(0.0), moment(s, steps=1, generated_tokens=12)) for s in (3.0, 1.0, 4.0, 2.0)]
    assert median_interval(intervals) is intervals[0]  # rates 4, 12, 3, 6: the lower of the two middle ones
    assert median_interval(intervals[1:]) is intervals[3]


def an_interval() -> DecodeInterval:
    """10 steps of 2 ms with 4 requests; each step has CPU jobs of 2 layers."""
    begin = {"steps": 5, "generated_tokens": 100, "cpu_jobs": 7, "cpu_weight_bytes": 1000, "schedule": 1.0}
    end = {"steps": 15, "generated_tokens": 140, "cpu_jobs": 27, "cpu_weight_bytes": 6000, "schedule": 1.001,
           "inputs": 0.001, "program": 0.018, "sample": 0.0, "cpu_seconds": 0.012,
           "cpu_waiting_seconds": 0.003, "cpu_needed": 80, "cpu_foreseen": 60, "cpu_gaps": 10,
           "cpu_gap_seconds": 0.0007}  # fmt: skip
    return DecodeInterval(moment(1.0, **begin), moment(1.02, **end))


def test_the_split_adds_up() -> None:
    split = split_ms(an_interval(), round_trip_us=50.0)
    wanted = {"cpu_experts_ms": 1.2, "transport_ms": 0.1, "gpu_ms": 0.5, "host_ms": 0.2, "cpu_waiting_ms": 0.3}
    assert split == pytest.approx(wanted)
    assert split_ms(an_interval(), None)["gpu_ms"] == pytest.approx(0.6)


def test_figures() -> None:
    read, rates = StepBytes(dense=1e6, resident=0, cpu=500), Rates(hbm=1e9, ram=1e9, pcie=5e8)
    figures = figures_of(an_interval(), gpu_plan(0, 0), 4, read, rates)
    assert figures["tokens_per_s"] == pytest.approx(2000)
    assert figures["tokens_per_s_per_request"] == pytest.approx(500)
    assert figures["step_ms"] == pytest.approx(2)
    assert figures["roof_tokens_per_s"] == pytest.approx(4 / 1.0005e-3)
    assert figures["roof_share"] == pytest.approx(2000 / (4 / 1.0005e-3))
    assert figures["fixed_us_per_layer"] == pytest.approx(70)
    assert figures["beside_us_per_layer"] == pytest.approx((2000 - 1200) / 2)
    assert figures["cpu_jobs_per_step"] == pytest.approx(2)
    assert figures["cpu_bytes_per_step"] == pytest.approx(500)
    assert figures["foreseen_share"] == pytest.approx(0.75)
    assert (figures["ram_bytes_per_s"], figures["pcie_bytes_per_s"]) == (1e9, 5e8)
    some = figures_of(an_interval(), gpu_plan(1, 0), 4, read, rates)
    assert (some["fixed_us_per_layer"], some["beside_us_per_layer"]) == (None, None), "the GPU's experts are in there"
    alone = figures_of(DecodeInterval(moment(1.0), moment(1.02, steps=1)), gpu_plan(0, 0), 4, read, rates)
    assert alone["fixed_us_per_layer"] is None, "no layer followed another"
    assert some["resident_share"] == 1 / 16


@pytest.mark.parametrize(
    ("percent", "experts"), [(None, "auto"), (0, "0"), (50, "64"), (12.5, "16"), (99.9, "128"), (100, "128")]
)
def test_resident_is_a_number_of_experts(percent: float | None, experts: str) -> None:
    assert case_of(HybridOptions(resident=percent)).engine.gpus.gpu_experts == experts


@pytest.mark.parametrize(("shape", "uncached"), [("tiny", 16), ("tiny-next", 100)])
def test_prompts_of_models_with_states_are_computed_again(shape: str, uncached: int) -> None:
    options = HybridOptions(shape=shape, requests="3", context=100, max_batch_tokens=13)
    assert case_of(options).uncached_tokens == uncached
    assert answer_tokens(options, 3, uncached) == options.output_tokens + 1 + 3 + -(-3 * uncached // 10) + 3


def test_the_engine_has_room_for_all_requests() -> None:
    options = HybridOptions(layers=2, requests="3,1", context=100, output_tokens=10, router="zipf")
    case = case_of(options)
    scheduler, cache, model = case.engine.scheduler, case.engine.cache, case.engine.model
    assert (case.counts, scheduler.max_running, model.load_format, model.dummy_router) == ((3, 1), 3, "dummy", "zipf")
    assert cache.context is not None
    assert cache.kv_memory is not None
    assert cache.context >= 100 + answer_tokens(options, 3, 16) > 110
    kv_bytes_per_token = declare(case.shape.config()).spec.kv_bytes_per_token(2)
    assert cache.kv_memory // (kv_bytes_per_token * 16) >= 3 * -(-cache.context // 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": ""}, "--requests"), ({"requests": "1,,2"}, "--requests"), ({"requests": "0"}, "--requests"),
        ({"requests": "-1"}, "--requests"), ({"requests": "5000"}, "--requests"), ({"layers": 49}, "has 48"),
        ({"requests": "8", "max_batch_tokens": 8}, "too small"),
        ({"requests": "512"}, "too small"),
        ({"resident": 50, "engine": HybridEngineOptions(gpus=GpuOptions(gpu_experts="3"))}, "--gpu-experts"),
        ({"resident": 0, "engine": HybridEngineOptions(gpus=GpuOptions(gpu_resident_layers="0"))}, "--resident"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        case_of(HybridOptions(**options))


def test_each_number_of_requests_once() -> None:
    assert case_of(HybridOptions(requests="2, 1,2,8")).counts == (2, 1, 8)


def test_prompts_are_random_and_the_same_every_time() -> None:
    prompts = random_prompts(512, 20, 40)
    assert prompts == random_prompts(512, 20, 40)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 20
    assert len({prompt[-1] for prompt in prompts}) > 10
    assert {len(prompt) for prompt in prompts} == {40}
    assert random_prompts(8, 3, 2) != random_prompts(8, 1, 2) * 3
    with pytest.raises(UsageError):
        random_prompts(512, 2, 1)


def test_the_table_shows_what_the_json_has() -> None:
    read, rates = StepBytes(dense=1 << 20, resident=0, cpu=5 << 20), Rates(hbm=4.2e12, ram=2.5e11, pcie=5.5e10)
    figures = figures_of(an_interval(), gpu_plan(0, 0), 4, read, rates) | {"round_trip_us": 13.5, "load_s": 2.0}
    figures |= placed_figures(an_interval(), gpu_plan(0, 0), 4, read, rates) | hit_figures(
        an_interval(), None, gpu_plan(0, 0)
    )
    found = result(
        "hybrid", "What?", "tiny", HybridOptions(), figures, split=split_ms(an_interval(), 50.0), notes=("on a boat",)
    )
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_hybrid([found]))
    text = console.export_text()
    console.file.close()
    for part in ("2000", "500", "500 B", "250 GB/s", "55.0 GB/s", "4200 GB/s", "13.5 us", "400 us", "on a boat"):
        assert part in text, part
    told = msgspec.json.decode(msgspec.json.encode(found))
    assert told["split"]["cpu_experts_ms"] == pytest.approx(1.2)
    assert told["figures"]["roof_share"] == figures["roof_share"]


def test_a_share_above_its_limit_is_shown_and_explained() -> None:
    """A share above 100 % is not clipped in the table or JSON, and the note names its number of requests."""
    read, rates = StepBytes(dense=1e6, resident=0, cpu=5e7), Rates(hbm=1e12, ram=1e10)
    results = []
    for requests in (1, 4):
        figures = figures_of(an_interval(), gpu_plan(0, 0), requests, read, rates) | {"round_trip_us": 13.5}
        figures |= placed_figures(an_interval(), gpu_plan(0, 0), requests, read, rates)
        figures |= hit_figures(an_interval(), None, gpu_plan(0, 0))
        notes = ("on a boat", *limit_notes(requests, figures, readings_of(11e9, 12e9)))
        results.append(
            result("hybrid", "?", "tiny", HybridOptions(), figures, split=split_ms(an_interval(), None), notes=notes)
        )
    assert results[0].figures["roof_share"] == pytest.approx(10, rel=0.1)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_hybrid(results))
    text = console.export_text()
    assert text.count("on a boat") == 1
    for words in (
        "--requests 1: 1000.2% of the roof is impossible", "--requests 4: 250.0% of the roof is impossible",
        "--requests 4: 250.0% of the roof as placed is impossible", "RAM readings: 11.0 GB/s, 12.0 GB/s", "1000",
    ):  # fmt: skip
        assert words in text, words
    assert "is impossible" in results[0].json()


def readings_of(*rates: float) -> RamReadings:
    readings = RamReadings(lambda: ram_of())
    readings.rates = [ram_of(rate) for rate in rates]
    return readings


def test_a_failed_gpu_measurement_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match="exit code 1"):
        measure_gpu(0)


@pytest.mark.gpu
def test_a_gpu_s_memory_is_faster_than_its_link() -> None:
    rates = measure_gpu(0)
    assert 1e9 < rates.pcie_bytes_per_s < rates.vram_bytes_per_s
    assert rates.vram_bytes_per_s < 8e12, "no GPU is so fast"
    assert 1e12 < rates.flops_per_s < 1e16
