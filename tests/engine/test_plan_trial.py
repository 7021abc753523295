"""The trial of plans on a loaded model: which wins, what later starts do, its bound, and that it leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partialmethod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engines import finish_all, request, tokens_of
from gpu_llm import make_model
from hybrid_engines import hybrid_of
from on_host import host_executor
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions, SchedulerOptions
from proa.engine.building import plan_trial
from proa.engine.building.load import load_engine, new_scheduler, new_turns
from proa.engine.building.plan_trial import (
    ROUNDS,
    ROW,
    TRIAL_S,
    Measured,
    PlanTrial,
    Subject,
    measure,
    verdict,
)
from proa.engine.engine import Engine
from proa.engine.executors.batch import step_limits
from proa.engine.ipc import Ready
from proa.engine.runner import Runner
from proa.hybrid.choices import Choices
from proa.hybrid.sim_experts import SimExperts
from proa.hybrid.transport import HostTransport
from proa.machine.cost import co_fetch
from proa.plan.plan import Plan
from proa.types import Decision
from quick_plan import prepare

BOTH, NO_FETCH, NO_READ, NEITHER = (Choices(*on) for on in ((True, True), (False, True), (True, False), (False, False)))
SLOW_S = 0.025  # a step of the tiny model takes some milliseconds, on a busy machine at times some tens
STEP_S = 0.005  # by the clock of trials


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, trial: str, device: str = "sim:64MiB,pcie=1GB/s", **asked: Any) -> tuple[Engine, Ready]:
    deterministic = asked.pop("deterministic", False)
    options = EngineOptions(
        ModelOptions(dtype="bfloat16"),
        CacheOptions(context=256),
        SchedulerOptions(deterministic=deterministic),
        MachineOptions(threads=2, cpu_binding="none"),
        GpuOptions(gpu=device, gpu_experts="3", plan_trial=trial, **asked),
    )
    return load_engine(prepare(str(folder), options).plan, lambda loading: None)


def row(ready: Ready, name: str = ROW) -> Decision | None:
    return next((row for row in ready.decisions if row.name == name), None)


def told(ready: Ready, name: str = ROW) -> tuple[str, str, str]:
    found = row(ready, name)
    assert found is not None
    return found.asked, found.got, found.why


def answer(engine: Engine) -> list[int]:
    engine.submit(request("r", list(range(20, 40)), 24))
    return tokens_of(finish_all(engine)["r"])


class Clock:
    """A clock that advances by a fixed time at each reading."""

    def __init__(self, step_s: float) -> None:
        self.now, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of trials. Other programs do not disturb it: on a busy machine a slow plan once won a round."""
    made = Clock(STEP_S)
    monkeypatch.setattr(PlanTrial, "result", partialmethod(PlanTrial.result, clock=made))
    return made


@contextmanager
def slow(
    on: type, method: str, when: Callable[..., bool], sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:  # fmt: skip
    """A method that sleeps before its work when the condition on its arguments holds."""
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(on, method)

        def slowed(self: Any, *args: Any, **kwargs: Any) -> Any:
            if when(self, *args):
                sleep(SLOW_S)
            return original(self, *args, **kwargs)

        patch.setattr(on, method, slowed)
        yield


def test_a_slow_rule_loses_and_the_result_is_kept(folder: Path, cache: Path, clock: Clock) -> None:
    with slow(HostTransport, "foresee", lambda self, *args: self.foresees, clock.sleep):
        engine, ready = load(folder, "again", co_fetch="off")
    asked, got, why = told(ready)
    assert (asked, got) == ("again", "co-fetch off, read ahead off")
    assert "ms per token, mean of 1 and 4 requests, against" in why
    assert f"in {ROUNDS} of {ROUNDS} rounds" in why
    assert why.endswith("kept for later starts")
    assert told(ready, "read ahead") == ("auto", "off", f"slower in the trial: see {ROW}")
    assert hybrid_of(engine).choices == NEITHER
    assert len(list(cache.iterdir())) == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_trial, "measure", None)  # not called: a later start tries nothing
        later, ready = load(folder, "auto", co_fetch="off")
    asked, got, why = told(ready)
    assert (asked, got) == ("auto", "co-fetch off, read ahead off")
    assert why.startswith("as tried on 20")
    assert why.endswith("--plan-trial again tries anew")
    assert told(ready, "read ahead")[1] == "off"
    assert hybrid_of(later).choices == NEITHER

    off, ready = load(folder, "off", co_fetch="off")
    assert told(ready) == ("off", "off", "as asked")
    assert hybrid_of(off).choices == NO_FETCH
    assert answer(engine) == answer(later) == answer(off)


def test_a_slow_other_plan_loses(folder: Path, cache: Path, clock: Clock) -> None:
    with slow(HostTransport, "push", lambda self, *args: not self.foresees, clock.sleep):
        engine, ready = load(folder, "again", co_fetch="off")
    assert told(ready)[1] == "co-fetch off, read ahead on"
    assert "is not clearly faster: in 0 of 2 rounds, 10 of 11 are needed" in told(ready)[2]
    assert told(ready, "read ahead")[1] == "on"
    assert hybrid_of(engine).choices == NO_FETCH


def test_slow_co_fetch_loses(folder: Path, cache: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # As fast as PCIe here: beside a CPU whose measured rate is some times that, the GPU is to read no expert at all.
    monkeypatch.setattr(co_fetch.CpuRate, "bytes_per_s", 1e9)

    def reads_in_ram(self: SimExperts, x: torch.Tensor, at: Any, weights: torch.Tensor) -> bool:
        return any(self._in_place(up) for up in at.up.flatten().tolist() if up)

    with slow(SimExperts, "start", reads_in_ram, clock.sleep):
        engine, ready = load(folder, "again", expert_placement="uniform", read_ahead="off")
    assert told(ready)[1] == "co-fetch off, read ahead off", told(ready)
    assert told(ready, "co-fetch") == ("auto", "off", f"slower in the trial: see {ROW}")
    assert not hybrid_of(engine).choices.co_fetch
    answer(engine)
    fetch, tables = hybrid_of(engine).co_fetch, hybrid_of(engine).tables
    assert fetch is not None
    assert tables is not None
    assert not any(fetch.in_force)
    assert not bool(tables._share.any()), "the GPU reads no expert in RAM"


@pytest.mark.parametrize("damage", [b"{", b""])
def test_a_damaged_file_at_start(
    folder: Path, cache: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    load(folder, "again", co_fetch="off")
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    _, ready = load(folder, "auto", co_fetch="off")
    assert caplog.text.count("cannot be read") == 1
    assert told(ready)[1] == "none"  # a simulated GPU is not compared by itself


@pytest.mark.parametrize(
    ("trial", "asked", "got"),
    [
        ("auto", {}, "none"),
        ("auto", {"co_fetch": "off", "read_ahead": "off"}, None),
        ("again", {"co_fetch": "off", "read_ahead": "off"}, "none"),
        ("again", {"co_fetch": "off", "doorbell": "callback"}, "none"),  # nothing reads ahead
        ("auto", {"co_fetch": "off", "doorbell": "callback"}, None),
        ("off", {"co_fetch": "off", "read_ahead": "off"}, None),
    ],
)
def test_without_a_trial(folder: Path, cache: Path, trial: str, asked: dict[str, str], got: str | None) -> None:
    _, ready = load(folder, trial, **asked)
    found = row(ready)
    assert (found and found.got) == got
    assert not cache.exists()


def test_deterministic_tries_only_what_changes_no_bit(folder: Path, cache: Path) -> None:
    engine, ready = load(folder, "again", deterministic=True)
    assert told(ready)[1].startswith("co-fetch off")
    assert not hybrid_of(engine).able.co_fetch
    other, _ = load(folder, "off", deterministic=True, read_ahead="off")
    assert answer(engine) == answer(other)


def rounded(value: Any) -> Any:
    """Seconds in whole nanoseconds, as they are counted: the rest is rounding of differences."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 9) if isinstance(value, float) else value


def stays(engine: Engine) -> list[object]:
    """What must not change: counters, counts of experts, heat, what is known of the CPU, and free pages."""
    hybrid = hybrid_of(engine)
    assert hybrid.counting is not None
    assert hybrid.moves is not None
    assert hybrid.co_fetch is not None
    assert hybrid.tables is not None
    counted = [engine.stats(), asdict(engine.runner.executor.counters()), asdict(hybrid.counting.tally)]
    counts = [hybrid.counting.totals, hybrid.tables.counts, hybrid.moves.heat.heat]
    kept = [asdict(hybrid.moves.moved), hybrid.co_fetch.shares, hybrid.co_fetch.in_force, hybrid.choices]
    return [rounded(msgspec.to_builtins(counted)), [None if of is None else of.tolist() for of in counts], kept]


def measured(engine: Engine, of: Plan, **clock: Any) -> Measured:
    subject = Subject(hybrid_of(engine), engine.runner.executor, of, engine.vocab)
    return measure(subject, (BOTH, NO_FETCH, NO_READ, NEITHER), lambda loading: None, **clock)


def planned(folder: Path, device: str = "sim:64MiB,pcie=1GB/s") -> Plan:
    options = EngineOptions(
        ModelOptions(dtype="bfloat16"),
        CacheOptions(context=256),
        machine=MachineOptions(threads=2, cpu_binding="none"),
        gpus=GpuOptions(gpu=device, gpu_experts="3", plan_trial="off"),
    )
    return prepare(str(folder), options).plan


def tries_and_stays(engine: Engine, of: Plan) -> None:
    before = stays(engine)
    found = measured(engine, of)
    assert len(found.seconds[0]) == max(len(rounds) for rounds in found.seconds[1:]) >= 2
    assert found.valid
    assert not found.same
    assert found.took_s <= TRIAL_S + 1
    hybrid_of(engine).choose(BOTH)
    assert stays(engine) == before


def test_nothing_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's experts move and are co-fetched, so every step would change something."""
    monkeypatch.setattr(co_fetch, "LEAST_BYTES", 1)
    of = planned(folder)
    (tried, _), (fresh, _) = (load_engine(of, lambda loading: None) for _ in range(2))
    tries_and_stays(tried, of)
    hybrid_of(tried).choose(NO_FETCH)
    hybrid_of(fresh).choose(NO_FETCH)
    assert answer(tried) == answer(fresh)
    cpu_of_tried, cpu_of_fresh = (engine.stats().cpu_experts for engine in (tried, fresh))
    assert cpu_of_tried.jobs == cpu_of_fresh.jobs > 0
    tried.scheduler.check()


def test_graphs_of_each_plan(folder: Path) -> None:
    """Hints are launches of a graph, shares of co-fetch are not: graphs of the plan that was not taken are dropped, and
    those of the plan taken are captured once."""
    of = planned(folder)
    engine, _ = load_engine(of, lambda loading: None)
    hybrid, eager = hybrid_of(engine), engine.runner.executor
    executor = host_executor(eager._model, eager.caches, step_limits(of), session=hybrid)
    subject = Subject(hybrid, executor, of, engine.vocab)
    found = measure(subject, (BOTH, NO_FETCH, NO_READ, NEITHER), lambda loading: None, clock=Clock(0.01))
    assert found.valid
    assert set(executor._graphs) == {(sequences, 1, variant) for sequences in (1, 4) for variant in (0, 1)}
    hybrid.choose(NEITHER)
    kept = {key: graph for key, graph in executor._graphs.items() if key[2] == 0}
    executor.keep_graphs()
    assert executor._graphs == kept
    runner = Runner(executor)
    again = Engine(runner, new_scheduler(of), engine.vocab, turns=new_turns(runner, of))
    assert len(answer(again)) == 24
    assert executor._graphs == kept


@pytest.mark.parametrize(("step_s", "rounds"), [(0.01, ROUNDS), (0.07, 3), (0.2, 0), (60.0, 0)])
def test_the_trial_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, rounds: int) -> None:
    """A step takes from one reading of the clock to the next: the bound holds but for the first step of all."""
    monkeypatch.setattr(co_fetch, "LEAST_BYTES", 1)
    monkeypatch.setattr(plan_trial, "may_win", lambda rule, other: True)  # by this clock all plans are equal
    of = planned(folder)
    engine, _ = load_engine(of, lambda loading: None)
    found = measured(engine, of, clock=Clock(step_s))
    assert found.took_s <= max(TRIAL_S, step_s) + 4 * step_s
    complete = len(found.seconds[0]) == ROUNDS
    assert complete == (not found.over)
    assert len(found.seconds[0]) == rounds
    assert hybrid_of(engine).choices == BOTH
    assert verdict(found)[0] == 0 or complete


def test_a_model_that_is_not_finite_is_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimExperts.finish
    monkeypatch.setattr(SimExperts, "finish", lambda self, *args: original(self, *args) * float("nan"))
    _, ready = load(folder, "again", co_fetch="off")
    assert "values were NaN or Inf" in told(ready)[2]
    assert told(ready)[2].endswith("not kept")
    assert not cache.exists()


@pytest.mark.parametrize(("context", "page_tokens"), [(1, 16), (2, 1), (5, 1)])
def test_a_cache_of_few_tokens(folder: Path, cache: Path, context: int, page_tokens: int) -> None:
    options = EngineOptions(
        ModelOptions(dtype="bfloat16"),
        CacheOptions(context=context, page_tokens=page_tokens),
        SchedulerOptions(max_running=1),
        MachineOptions(threads=2, cpu_binding="none"),
        GpuOptions(gpu="sim:64MiB", gpu_experts="3", co_fetch="off", plan_trial="again"),
    )
    _, ready = load_engine(prepare(str(folder), options).plan, lambda loading: None)
    assert "ms per token against" in told(ready)[2]


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu(folder: Path, cache: Path) -> None:
    """Graphs with and without hints alternate; those of the plan not taken are dropped, and tokens stay the same."""
    found, starts = [], {"auto": "auto", "kept": "auto", "off": "off"}
    for name, trial in starts.items():
        engine, ready = load(folder, trial, "0", co_fetch="off", expert_placement="uniform")
        why, choices = told(ready)[2], hybrid_of(engine).choices
        assert engine.stats().cpu_experts.jobs == 0
        if name == "auto":
            assert why.endswith("kept for later starts")
            assert f"of {ROUNDS}" in why  # all rounds, or what of all of them a plan would have needed
            assert {key[2] for key in engine.runner.executor._graphs} == {int(choices.read_ahead)}
        found.append((answer(engine), choices))
        assert why.startswith({"auto": "", "kept": "as tried on 20", "off": "as asked"}[name])
        del engine
        torch.cuda.empty_cache()
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]


@pytest.mark.gpu
@pytest.mark.alone
def test_slow_hints_lose_on_a_gpu(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hint is followed by products that take longer than the CPU's experts, in the graph too."""
    from proa.hybrid.gpu_ways import ByKernels  # needs Triton

    original, square = ByKernels.foresee, torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(square)

    def slowed(self: ByKernels, *args: Any) -> None:
        original(self, *args)
        for _ in range(50):
            torch.mm(square, square, out=product)

    monkeypatch.setattr(ByKernels, "foresee", slowed)
    engine, ready = load(folder, "auto", "0", co_fetch="off")
    assert told(ready)[1] == "co-fetch off, read ahead off"
    assert told(ready, "read ahead")[1] == "off"
    assert hybrid_of(engine).choices == NEITHER
    assert {key[2] for key in engine.runner.executor._graphs} <= {0}


@pytest.mark.gpu
@pytest.mark.alone
def test_nothing_is_left_behind_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four plans, with experts that move and are read in place."""
    monkeypatch.setattr(co_fetch, "LEAST_BYTES", 1)
    of = planned(folder, "0")
    engine, _ = load_engine(of, lambda loading: None)
    tries_and_stays(engine, of)
    assert len(answer(engine)) == 24
