"""`proa bench hybrid`: decode speed with experts on a GPU and the CPU. Uses random weights, made in memory, of real
models' shapes. hybrid_figures.py computes the figures, hybrid_table.py prints them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from proa.bench.asked import gpu_of, need_gpu, parse_numbers
from proa.bench.hybrid_ask import SETTLING_TOKENS, run_requests
from proa.bench.hybrid_beside import MOST_TOKENS, Beside, ask_beside, beside_figures
from proa.bench.hybrid_drift import drift_figures, drift_tokens_each
from proa.bench.hybrid_figures import (
    DecodeInterval,
    Rates,
    best_bytes,
    choices_per_step,
    common_interval,
    dense_bytes,
    expected_bytes,
    figures_of,
    hit_figures,
    median_interval,
    placed_bytes,
    placed_figures,
    split_ms,
    trace_of,
    uncached_steps,
)
from proa.bench.hybrid_hits import Trace, read_trace
from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.limit import RamReadings, busy_notes, excess_notes, ram_meter
from proa.bench.predicted import Planned, planned, predicted_decode
from proa.bench.prompts import random_prompts
from proa.bench.result import Result, result
from proa.config.field import option
from proa.config.options import (
    DUMMY_FORMATS,
    CacheOptions,
    EngineOptions,
    GpuOptions,
    MachineOptions,
    ModelOptions,
    SchedulerOptions,
)
from proa.engine.ipc import Ready
from proa.engine.processes.client import EngineClient
from proa.engine.processes.handle import EngineHandle
from proa.errors import ProaError, UsageError
from proa.machine.cost.turns import SHARED_TOKENS
from proa.models.families import declare
from proa.plan.budget import KV_ELEM_BYTES
from proa.plan.opened import open_if_here
from proa.plan.plan import GpuPlan
from proa.plan.prepare import Prepared, prepare
from proa.weights.frequencies import ROUTERS

BESIDE_QUESTION = "How long do a new prompt and the decoding requests wait for each other?"
DRIFT_QUESTION = "How fast does the placement adapt when other experts become hot?"
QUESTION = "How fast do a GPU and the CPU decode together?"
WARM_UP_TOKENS = 4  # per request, after its prompt: captures graphs for the batch size
MOST_REQUESTS = 4096
STEPS_BETWEEN_PARTS = 8  # most decode steps per prefill step with a gap of LONGEST_GAP
LONGEST_GAP = "20x"  # max_itl with --deterministic, in which prefill cannot share steps with decode


@dataclass(frozen=True)
class HybridEngineOptions:
    """The engine options that apply to a model of random weights."""

    machine: MachineOptions = field(default_factory=MachineOptions)
    gpus: GpuOptions = field(default_factory=GpuOptions)


@dataclass(frozen=True)
class HybridOptions:
    """Options of `proa bench hybrid`."""

    shape: str = option(
        "qwen3-30b-a3b",
        help="the model whose layer sizes are used; its weights are random",
        choices=tuple(MODEL_SHAPES), common=True,
    )  # fmt: skip
    layers: int | None = option(None, help="number of its layers to use; default: all", low=1, high=1000, common=True)
    format: str = option(
        "bf16", help="format of experts and linear layers: see --dummy-format",
        choices=DUMMY_FORMATS, common=True,
    )  # fmt: skip
    resident: float | None = option(
        None, help="percentage of each layer's experts in VRAM; default: as many as fit", metavar="PERCENT",
        low=0, high=100, common=True,
    )  # fmt: skip
    requests: str = option(
        "1,2,4,8",
        help="numbers of requests that decode together, measured one after another",
        metavar="LIST",
        common=True,
    )
    context: int = option(1024, help="length of each prompt", kind="tokens", low=2, high=1 << 19, common=True)
    output_tokens: int = option(
        64, help="least number of decode steps to time", kind="tokens", low=2, high=1 << 19, common=True
    )
    router: str = option(
        "uniform", help="routing; uniform: all experts equally likely; zipf: a few hot experts; "
        "drift: other hot experts after --drift-tokens",
        choices=ROUTERS, common=True,
    )  # fmt: skip
    drift_tokens: int = option(
        500, help="tokens per request before its hot experts change, and as many after it, for the placement to adapt",
        kind="tokens", low=20, high=1 << 18,
    )  # fmt: skip
    prompt_tokens: int | None = option(
        None, help="measure waiting times if a prompt of this length arrives while the requests decode",
        kind="tokens", low=2, high=1 << 19,
    )  # fmt: skip
    max_itl: str | None = option(
        None, help="with --prompt-tokens: as --max-itl of `proa serve`", metavar="GAP", kind="word"
    )
    runs: int = option(3, help="runs per number of requests; the run of median rate is reported", low=1, high=1000)
    max_batch_tokens: int | None = option(
        None, help="most tokens of one prefill step; default: 512, with --prompt-tokens that of `proa serve`",
        kind="tokens", low=1, high=1 << 20,
    )  # fmt: skip
    kv_dtype: str = option(
        "auto", help="type of the KV cache: as --kv-dtype of `proa serve`", choices=("auto", "bf16", "fp8")
    )
    deterministic: bool = option(False, help="measure with --deterministic of `proa serve`")
    engine: HybridEngineOptions = field(default_factory=HybridEngineOptions)


@dataclass(frozen=True)
class HybridCase:
    """The measurement that the options describe."""

    shape: ModelShape
    counts: tuple[int, ...]  # numbers of requests
    engine: EngineOptions
    uncached_tokens: int  # tokens of each prompt that are computed again at every repetition

    @property
    def most(self) -> int:
        return max(self.counts)


def run(options: HybridOptions, report: Callable[[Result], None]) -> None:
    """Load the model, then measure each number of requests and `report` each result. With deferred experts, first
    without them. Raises ProaError."""
    gpus, exact = options.engine.gpus, replace(options.engine.gpus, deferred_experts=0)
    case_of(options)
    need_gpu(gpus)
    for asked in (exact, gpus) if gpus.deferred_experts else (gpus,):
        _run(replace(options, engine=replace(options.engine, gpus=asked)), report)


def _run(options: HybridOptions, report: Callable[[Result], None]) -> None:
    notes = busy_notes()
    case = case_of(options)
    with case.shape.folder() as folder:
        prepared = prepare(case.shape.name, case.engine, opened=open_if_here(str(folder), case.engine.model))
        gpu = gpu_of(prepared.plan)
        some = 0 < sum(map(len, gpu.resident)) < sum(gpu.experts)
        if options.router == "drift" and not some:
            raise UsageError(
                "--router drift has no effect if all experts are in VRAM, or none.", "Use for example --resident 25."
            )
        if some:  # tracing has a small cost, and no use if all experts are in VRAM or none
            prepared = _traced(prepared, gpu, folder / "trace")
        measured = planned(prepared, case.engine)  # before the engine takes the GPU's memory
        asyncio.run(_measure_all(options, case, prepared, measured, notes, report))


def _traced(prepared: Prepared, gpu: GpuPlan, file: Path) -> Prepared:
    plan = msgspec.structs.replace(prepared.plan, gpus=(msgspec.structs.replace(gpu, trace=str(file)),))
    return replace(prepared, plan=plan)


def case_of(options: HybridOptions) -> HybridCase:
    """Check the options and derive the engine's options. Raises UsageError."""
    shape = MODEL_SHAPES[options.shape].cut(options.layers)
    counts = parse_numbers(options.requests, "requests", 1, MOST_REQUESTS)
    most = max(counts)
    if _step_tokens(options) <= most:
        raise UsageError(
            f"--max-batch-tokens {_step_tokens(options)} is too small for {most} requests.", f"Use more than {most}."
        )
    page_tokens = CacheOptions().page_tokens
    spec = declare(shape.config()).spec
    whole = spec.recurrent or options.deterministic  # then no prefix of the prompt is reused
    uncached = options.context if whole else page_tokens
    answers = answer_tokens(options, most, uncached)
    if options.router == "drift":
        answers = 2 * _drift_answer(options, most, uncached) + 1
    if options.prompt_tokens is not None:
        if options.router == "drift":
            raise UsageError("--prompt-tokens and --router drift are different measurements.", "Give only one of them.")
        answers, most = max(MOST_TOKENS, options.prompt_tokens - options.context), most + 1
    elif options.max_itl is not None:
        raise UsageError("--max-itl has an effect only with --prompt-tokens.", "Add --prompt-tokens.")
    tokens = options.context + WARM_UP_TOKENS + answers
    pages = -(-tokens // page_tokens) + 1
    kv_bytes = spec.kv_bytes_per_token(KV_ELEM_BYTES["float8_e4m3fn" if options.kv_dtype == "fp8" else "bfloat16"])
    engine = EngineOptions(
        model=ModelOptions(
            dtype="bfloat16", load_format="dummy", dummy_router=options.router, dummy_format=options.format
        ),
        cache=CacheOptions(
            context=tokens,
            kv_memory=most * pages * page_tokens * kv_bytes,
            kv_dtype=options.kv_dtype,
            page_tokens=page_tokens,
            prefix_cache=not spec.recurrent,  # cached copies of states would take VRAM from experts
        ),
        scheduler=SchedulerOptions(
            max_running=most,
            max_batch_tokens=_step_tokens(options) if options.prompt_tokens is None else options.max_batch_tokens,
            max_itl=_max_itl(options),
            deterministic=options.deterministic,
        ),
        machine=options.engine.machine,
        gpus=_gpus(options, shape),
    )
    return HybridCase(shape, counts, engine, uncached)


def _max_itl(options: HybridOptions) -> str:
    """Return max_itl. If no late prompt is measured, prefill shares steps with decode, so that all requests decode
    together sooner."""
    if options.prompt_tokens is not None:
        return options.max_itl or "auto"
    return LONGEST_GAP if options.deterministic else "none"


def _gpus(options: HybridOptions, shape: ModelShape) -> GpuOptions:
    gpus = options.engine.gpus
    if gpus.plan_trial == "auto":  # what is measured does not depend on earlier starts
        gpus = replace(gpus, plan_trial="off")
    if options.resident is None:
        return gpus
    if gpus.gpu_experts != "auto" or gpus.gpu_resident_layers is not None:
        raise UsageError(
            "--resident excludes --gpu-experts and --gpu-resident-layers.", "Give only one of these options."
        )
    return replace(gpus, gpu_experts=str(round(shape.experts * options.resident / 100)))


def answer_tokens(options: HybridOptions, requests: int, uncached_tokens: int) -> int:
    """Return the answer length of each request: the timed steps, and the steps until all requests decode.
    uncached_tokens: tokens of each prompt that are not in the prefix cache."""
    steps = uncached_steps(requests, uncached_tokens, _step_tokens(options))
    if options.deterministic:  # decode steps alternate with prefill steps
        steps *= STEPS_BETWEEN_PARTS
    return options.output_tokens + 1 + SETTLING_TOKENS + steps


def _step_tokens(options: HybridOptions) -> int:
    return options.max_batch_tokens or SHARED_TOKENS


def _drift_answer(options: HybridOptions, requests: int, uncached_tokens: int) -> int:
    """Return the tokens that each request generates before the drift; it generates as many after it."""
    interval = drift_tokens_each(options.drift_tokens) + SETTLING_TOKENS
    if uncached_tokens == options.context:  # nothing is cached, and the second prompt contains the first answer
        uncached_tokens += interval
    return interval + uncached_steps(requests, uncached_tokens, _step_tokens(options))


async def _measure_all(
    options: HybridOptions, case: HybridCase, prepared: Prepared, planned: Planned, notes: Sequence[str],
    report: Callable[[Result], None],
) -> None:  # fmt: skip
    engine = await EngineClient.launch(prepared.plan, own_thread=True)
    try:
        ready = await engine.wait_ready()
        bench = HybridBench(options, case, prepared, ready, planned)
        measure = bench.measure_drift if options.router == "drift" else bench.measure
        if options.prompt_tokens is not None:
            measure = bench.measure_beside
        for count in case.counts:
            report(await measure(engine, count, tuple(notes)))
    finally:
        await engine.close()


class HybridBench:
    """Measures runs on a loaded engine."""

    def __init__(
        self, options: HybridOptions, case: HybridCase, prepared: Prepared, ready: Ready, planned: Planned
    ) -> None:  # fmt: skip
        self._gpu = gpu_of(prepared.plan)
        self._options, self._case, self._prepared = options, case, prepared
        self._ready, self._planned = ready, planned
        self._meter = ram_meter(case.engine.machine)
        # With drift, each half of the vocabulary has its own hot experts: start in the lower half.
        vocab = case.shape.vocab // 2 if options.router == "drift" else case.shape.vocab
        self._prompts = random_prompts(vocab, case.most, options.context)

    async def measure(self, engine: EngineHandle, requests: int, notes: tuple[str, ...]) -> Result:
        """Measure `requests` decoding together, `runs` times, with prompts cached by a previous run; measure RAM
        bandwidth before and after each run."""
        options, prompts = self._options, self._prompts[:requests]
        tokens = answer_tokens(options, requests, self._case.uncached_tokens)
        await run_requests(engine, prompts, 1)
        await run_requests(engine, prompts, WARM_UP_TOKENS + tokens - options.output_tokens)
        readings = RamReadings(self._meter)
        runs = [await readings.measure_run(partial(run_requests, engine, prompts, tokens)) for _ in range(options.runs)]
        await readings.read()
        intervals = [_whole(common_interval(answer.moments for answer in run), options.output_tokens) for run in runs]
        interval = median_interval(intervals)
        rates = self._rates_of(readings.of_run(intervals.index(interval)))
        context_tokens = options.context + tokens / 2
        figures = self._figures(interval, requests, context_tokens, rates)
        figures |= {"predicted_tokens_per_s": self._predicted(requests, context_tokens, rates)}
        figures |= {"round_trip_us": self._ready.round_trip_us, "load_s": self._ready.load_seconds}
        read = readings.all_bytes_per_s
        figures |= {"ram_least_bytes_per_s": min(read), "ram_most_bytes_per_s": max(read)}
        split = split_ms(interval, self._ready.round_trip_us)
        all_notes = (*notes, *self._notes(), *limit_notes(requests, figures, readings))
        return result("hybrid", QUESTION, self._case.shape.name, options, figures, split=split, notes=all_notes)

    async def measure_drift(self, engine: EngineHandle, requests: int, notes: tuple[str, ...]) -> Result:
        """Measure `requests` decoding together in one run: equally many tokens before and after the hot experts change.
        Each request then continues its sequence with a token of the vocabulary's upper half."""
        options, prompts = self._options, self._prompts[:requests]
        each = _drift_answer(options, requests, self._case.uncached_tokens)
        await run_requests(engine, prompts, 1)
        readings = RamReadings(self._meter)
        before = await readings.measure_run(partial(run_requests, engine, prompts, each))
        upper = self._case.shape.vocab // 2
        longer = [[*p, *a.tokens, upper + i] for i, (p, a) in enumerate(zip(prompts, before, strict=True))]
        after = await readings.measure_run(partial(run_requests, engine, longer, each))
        await readings.read()
        slots = [len(ids) for ids in self._gpu.resident]
        figures = drift_figures(before, after, self._trace(self._gpu.trace or ""), slots, options.drift_tokens)
        rates = self._rates_of(readings.typical)
        figures |= {"requests": requests, "round_trip_us": self._ready.round_trip_us}
        figures |= {f"{name}_bytes_per_s": getattr(rates, name) for name in ("hbm", "ram", "pcie")}
        all_notes = (*notes, *self._notes(), *readings.notes())
        return result("hybrid-drift", DRIFT_QUESTION, self._case.shape.name, options, figures, notes=all_notes)

    async def measure_beside(self, engine: EngineHandle, requests: int, notes: tuple[str, ...]) -> Result:
        """Measure a prompt that arrives while `requests` decode. Each run has a new prompt, which shares no cached
        prefix, and one more alone; the first run warms up."""
        options, count = self._options, self._options.prompt_tokens or 0
        late = random_prompts(self._case.shape.vocab, 2 * (options.runs + 1), count, seed=requests)
        prompts, alone, runs = self._prompts[:requests], list[Beside](), list[Beside]()
        for i in range(options.runs + 1):
            alone.append(await ask_beside(engine, [], late[2 * i], f"{requests} {i} alone"))
            runs.append(await ask_beside(engine, prompts, late[2 * i + 1], f"{requests} {i}"))
        plan = self._prepared.plan
        figures = beside_figures(runs[1:], alone[1:], count, plan.max_itl)
        figures["max_batch_tokens"] = float(plan.max_batch_tokens)
        all_notes = (*notes, *self._notes())
        return result("hybrid-beside", BESIDE_QUESTION, self._case.shape.name, options, figures, notes=all_notes)

    def _figures(
        self, interval: DecodeInterval, requests: int, context_tokens: float, rates: Rates
    ) -> dict[str, float | None]:
        spec, gpu = self._prepared.declared.spec, self._gpu
        dense = dense_bytes(spec, gpu, requests, context_tokens, KV_ELEM_BYTES[self._prepared.plan.kv_dtype])
        router, cpu_bytes = self._options.router, interval.per_step("cpu_experts.weight_bytes")
        read = placed = expected_bytes(spec, gpu, router, requests, dense, cpu_bytes)
        trace = None
        if gpu.trace is not None:
            trace = trace_of(interval, self._trace(gpu.trace))
            choices = choices_per_step(spec, requests)
            placed = placed_bytes(interval, gpu, requests, dense, choices)
            if router != "uniform":
                read = best_bytes(trace, gpu, requests, dense, choices)
        figures = figures_of(interval, gpu, requests, read, rates) | placed_figures(
            interval, gpu, requests, placed, rates
        )
        return figures | hit_figures(interval, trace, gpu)

    def _predicted(self, requests: int, context_tokens: float, rates: Rates) -> float | None:
        """The prediction of `proa plan`, by this run's bandwidths; None for routing that is not uniform."""
        if self._options.router != "uniform":
            return None
        plan, bandwidths = self._prepared.plan, {"ram_bytes_per_s": rates.ram, "vram_bytes_per_s": rates.hbm}
        return predicted_decode(plan, self._planned.work, requests, context_tokens, **bandwidths)

    def _trace(self, file: str) -> Trace:
        return read_trace(Path(file), len(self._gpu.experts), max(self._gpu.experts))

    def _rates_of(self, ram: float) -> Rates:
        gpu = self._planned.gpu
        if gpu is None:
            return Rates(hbm=ram, ram=ram, pcie=self._gpu.pcie_bytes_per_s)
        return Rates(hbm=gpu.vram_bytes_per_s, ram=ram, pcie=gpu.pcie_bytes_per_s)

    def _notes(self) -> list[str]:
        shape, gpu = self._case.shape, self._gpu
        notes = [f"GPU: {gpu.name}"]
        if gpu.simulated:
            notes.append("the GPU is simulated: VRAM has RAM's bandwidth, and the CPU does the GPU's work")
        if shape.note:
            notes.append(f"{shape.name}: {shape.note}")
        return notes


def limit_notes(requests: int, figures: Mapping[str, float | None], readings: RamReadings) -> list[str]:
    """Return the notes on limits, each with its number of requests: one table prints the notes of several results."""
    shares = {"the roof": "roof_share", "the roof as placed": "roof_as_placed_share"}
    excess = [
        note for what, name in shares.items() for note in excess_notes(figures[name], readings.all_bytes_per_s, what)
    ]
    return [f"--requests {requests}: {note}" for note in (*readings.notes(), *excess)]


def _whole(interval: DecodeInterval | None, steps: int) -> DecodeInterval:
    if interval is None or interval.steps < steps:
        found = 0 if interval is None else interval.steps
        raise ProaError(f"All requests decoded together for only {found} of {steps} steps.", "Use fewer --requests.")
    return interval
