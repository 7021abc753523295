"""--deterministic: a request has the same tokens and log-probabilities, bit for bit, in any schedule. Planned engines,
whose answers under drawn schedules are compared with those of each request by itself."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from hybrid_engines import hybrid_of
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.machine.cost.prefill import CpuExpertCost, PrefillRates
from proa.ops.sizes import RING_BANKS
from proa.types import EngineRequest, Sampling
from quick_plan import prepare
from tiny import make_tiny

CONTEXT = 448
STEM = [(7 * i) % 200 + 20 for i in range(CONTEXT)]
LEAST = 2  # schedules, so that a request finds pages of an earlier one
PAGES = 34  # of 16 tokens: little more than one context, so that requests are preempted
CELL, EXPERTS_PER_BANK = 64, 2


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)


def requests() -> dict[str, EngineRequest]:
    """Prompts of 1 to 390 tokens that share beginnings; greedy, seeded, and one that asks for its prompt's logprobs."""
    prompts = [
        STEM[:33], STEM[:1], [*STEM[:200], 5], [*STEM[:200], 9, 10, 11], STEM[:390], [*STEM[:16], *range(30, 90)],
        list(range(100, 117)), STEM[:129], [*STEM[:64], *STEM[:64]], STEM[:370],
    ]  # fmt: skip
    found = {}
    for i, tokens in enumerate(prompts):
        sampling = Sampling(
            max_tokens=[12, 40, 25][i % 3], temperature=0.0 if i % 2 else 0.8, seed=i, logprobs=2, eos_token_ids=(),
            prompt_logprobs=1 if i == 5 else None,
        )  # fmt: skip
        found[f"r{i}"] = EngineRequest(id=f"r{i}", tokens=tokens, sampling=sampling)
    return found


@dataclass(frozen=True)
class Arrival:
    name: str
    step: int  # the step before which it is submitted
    priority: int
    abort_after: int | None  # steps


@dataclass
class Seen:
    """The most tokens of one prompt, and the most prompts, in a step of prompts."""

    tokens: int = 0
    prompts: int = 0


def run(engine: Engine, arrivals: Sequence[Arrival], seen: Seen | None = None) -> dict[str, Answer]:
    """Answers of the requests that were not aborted, by index."""
    asked, answers = requests(), dict[str, Answer]()
    aborted = set[str]()
    for step in range(100_000):
        due = [(f"{i}", a) for i, a in enumerate(arrivals) if a.step == step]
        for number, arrival in due:
            source = asked[arrival.name]
            engine.submit(msgspec.structs.replace(source, id=number, priority=arrival.priority))
        for i, arrival in enumerate(arrivals):
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step and engine.abort(f"{i}"):
                aborted.add(f"{i}")
        if not engine.has_work and step >= max((a.step for a in arrivals), default=0):
            return {number: answer for number, answer in answers.items() if number not in aborted}
        events = engine.step()
        if seen is not None and (beside := engine.scheduler.beside) is not None:
            seen.tokens = max(seen.tokens, *(item.num_tokens for item in beside.items))
            seen.prompts = max(seen.prompts, len(beside.items))
        for event in events:
            assert event.finish != "error", event.error
            answer = answers.setdefault(event.id, Answer())
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs or []
            answer.prompt_logprobs += event.prompt_logprobs or []
    raise AssertionError("the engine did not come to an end")


@dataclass(frozen=True)
class Case:
    """streamed_from: least tokens of a cell that is streamed, in place of the planned number. in_groups: a bank of the
    ring holds a part of a layer's streamed experts."""

    model: str
    options: dict[str, Any]
    examples: int
    streamed_from: int = 0
    in_groups: bool = False

    @property
    def is_native(self) -> bool:
        return self.options["gpu"] == "none" and self.options["dtype"] == "bfloat16"


NATIVE = {"dtype": "bfloat16", "gpu": "none"}
SIM = {"dtype": "bfloat16", "gpu": "sim:256MiB", "gpu_experts": "3"}
GPU = {"dtype": "bfloat16", "gpu": "0", "gpu_experts": "3"}
MANY = {"gpu_experts": "all", "max_running": 12}  # so many rows that pairs of experts are grouped
CASES = [
    pytest.param(Case("qwen3-moe", NATIVE, 12), id="native"),
    pytest.param(Case("qwen3-next", NATIVE, 12), id="native-recurrent"),
    pytest.param(Case("deepseek-v3", NATIVE, 12), id="native-latent"),
    pytest.param(Case("mixtral-window", NATIVE, 12), id="native-window"),
    pytest.param(Case("qwen3-moe", NATIVE | {"kv_dtype": "fp8"}, 12), id="native-fp8-kv"),
    pytest.param(Case("qwen3-moe", {"dtype": "float32", "gpu": "none", "threads": 1}, 4), id="torch"),
    pytest.param(Case("qwen3-moe", SIM, 8), id="sim"),
    pytest.param(Case("qwen3-next", SIM, 8), id="sim-recurrent"),
    pytest.param(Case("qwen3-moe", SIM | {"deferred_experts": 2}, 8), id="sim-deferred"),
    pytest.param(Case("qwen3-moe", SIM, 8, 24), id="sim-streamed"),
    pytest.param(Case("qwen3-moe", SIM | {"prefill": "stream"}, 8, 1, in_groups=True), id="sim-streamed-in-groups"),
    pytest.param(Case("qwen3-next", SIM, 8, 24, in_groups=True), id="sim-streamed-recurrent"),
    pytest.param(Case("qwen3-moe", SIM | {"prefill": "cpu"}, 8), id="sim-not-streamed"),
    pytest.param(Case("qwen3-moe", GPU, 10), id="cuda", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU, 12, 24), id="cuda-streamed", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU | {"prefill": "stream"}, 12, 1), id="cuda-all-streamed", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU, 12, 1, in_groups=True), id="cuda-streamed-in-groups", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-next", GPU, 12, 24, in_groups=True), id="cuda-streamed-recurrent", marks=pytest.mark.gpu),
    pytest.param(Case("gpt-oss", GPU, 12, 24, in_groups=True), id="cuda-streamed-biases", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU | {"prefill": "cpu"}, 10), id="cuda-not-streamed", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU | {"deferred_experts": 2}, 10), id="cuda-deferred", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU | {"gpu_experts": "all"}, 10), id="cuda-all", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-moe", GPU | MANY, 10), id="cuda-many", marks=pytest.mark.gpu),
    pytest.param(Case("qwen3-next", GPU | MANY, 10), id="cuda-many-recurrent", marks=pytest.mark.gpu),
    pytest.param(
        Case("qwen3-moe", GPU | {"gpu_experts": "all", "max_running": 20}, 8), id="cuda-one-size", marks=pytest.mark.gpu
    ),
    pytest.param(Case("qwen3-next", GPU, 12), id="cuda-recurrent", marks=pytest.mark.gpu),
    pytest.param(Case("deepseek-v3", GPU, 12), id="cuda-latent", marks=pytest.mark.gpu),
    pytest.param(Case("gpt-oss", GPU, 12), id="cuda-sinks", marks=pytest.mark.gpu),
]


def engine_of(folder: Path, case: Case, **more: Any) -> Engine:
    asked = {
        "deterministic": True, "max_batch_tokens": CELL, "context": CONTEXT, "threads": 2, "cpu_binding": "none",
        "max_running": 4,
        **case.options, **more,
    }  # fmt: skip
    plan = msgspec.structs.replace(prepare(str(folder), from_keywords(EngineOptions, **asked)).plan, num_pages=PAGES)
    if case.streamed_from:
        assert plan.streamed_cell_tokens > 0
        plan = msgspec.structs.replace(plan, streamed_cell_tokens=case.streamed_from)
    if case.in_groups and (gpu := plan.gpu) is not None:
        bank_bytes = EXPERTS_PER_BANK * max(gpu.expert_bytes)
        plan = msgspec.structs.replace(plan, gpus=(msgspec.structs.replace(gpu, ring_bytes=RING_BANKS * bank_bytes),))
    return load_engine(plan, lambda loading: None)[0]


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        name=st.sampled_from(sorted(requests())),
        step=st.integers(0, 25),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        abort_after=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    ),
    min_size=6,
    max_size=9,
)


@pytest.mark.seldom
@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_the_schedule(case: Case, tmp_path: Path) -> None:
    number = max(LEAST, examples(case.examples))
    folder = make_tiny(case.model, tmp_path)
    alone = engine_of(folder, case, prefix_cache=False)
    want = {name: run(alone, [Arrival(name, 0, 0, None)])["0"] for name in requests()}
    del alone
    gc.collect()  # it has cycles, and its VRAM counts as the next engine's
    # On a CPU any step of prompts gives the same; elsewhere its cells are the plan's.
    engine = engine_of(folder, case, **({"max_batch_tokens": 170} if case.is_native else {}))

    if case.streamed_from:
        streaming = hybrid_of(engine).streaming
        assert streaming is not None
        streaming.rates = PrefillRates(1.0, CpuExpertCost(1e-9, 1e-9))  # as if copies were slow, which decides nothing
    seen = Seen()

    @settings(
        max_examples=number, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(ARRIVALS)
    def check(arrivals: list[Arrival]) -> None:
        for number, answer in run(engine, arrivals, seen).items():
            assert answer == want[arrivals[int(number)].name]

    check()
    stats = engine.stats()
    assert stats.scheduler.cached_prompt_tokens > 0
    # On a GPU turns follow the clock, and prompts may end before pages are short: the simulated one preempts.
    timed = case.options.get("gpu") == "0"
    assert stats.scheduler.preemptions > 0 or number < 6 or timed, "the schedules exercise too little"
    if case.streamed_from:
        assert stats.prefill.passes > 0 == stats.prefill.left_to_cpu
        assert seen.tokens > CELL, "no pass has several cells"
        assert seen.prompts > 1, "no pass has several prompts"
    if case.options.get("prefill") == "cpu":
        assert stats.prefill.passes == 0
