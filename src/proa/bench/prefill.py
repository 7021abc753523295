"""`proa bench prefill`: time to first token by the length of the prompt, with experts on a GPU and in RAM. Uses random
weights, made in memory, of real models' shapes. prefill_bound.py computes the bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import median

from proa.bench.asked import gpu_of, need_gpu, parse_numbers
from proa.bench.gpu_rates import vram_taken
from proa.bench.hybrid import HybridEngineOptions
from proa.bench.hybrid_ask import greedy
from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.limit import busy_notes
from proa.bench.predicted import planned
from proa.bench.prefill_bound import Limits, Shape, bound_s, prediction_error
from proa.bench.prompts import random_prompts
from proa.bench.result import Result, result
from proa.config.field import option
from proa.config.options import (
    DUMMY_FORMATS,
    CacheOptions,
    EngineOptions,
    GpuOptions,
    ModelOptions,
    SchedulerOptions,
)
from proa.engine.processes.client import EngineClient
from proa.engine.processes.handle import EngineHandle
from proa.engine.stats import PrefillStats
from proa.errors import ProaError, UsageError
from proa.machine.cost.prefill import CpuExpertCost
from proa.machine.rates import GpuRate
from proa.models.families import declare
from proa.plan.budget import KV_ELEM_BYTES
from proa.plan.opened import open_if_here
from proa.plan.predict import prefill
from proa.plan.prepare import Prepared, prepare, ram_rate
from proa.weights.frequencies import ROUTERS

QUESTION = "How long does a prompt take to its first token?"
WARM_UP = 3  # prompts of each length before those that count: kernels are loaded, graphs captured, rates measured
MOST_PROMPT = 1 << 20


@dataclass(frozen=True)
class PrefillOptions:
    """Options of `proa bench prefill`."""

    shape: str = option(
        "qwen3-30b-a3b", help="the model whose layer sizes are used; its weights are random",
        choices=tuple(MODEL_SHAPES), common=True,
    )  # fmt: skip
    layers: int | None = option(None, help="number of its layers to use; default: all", low=1, high=1000, common=True)
    format: str = option(
        "bf16", help="format of experts and linear layers: see --dummy-format", choices=DUMMY_FORMATS, common=True
    )
    tokens: str = option(
        "128,512,2048,8192,16384", help="lengths of the prompts, measured one after another", metavar="LIST",
        common=True,
    )  # fmt: skip
    cached: int = option(
        0, help="tokens of a prefix that is in the prefix cache before each prompt", kind="tokens", low=0,
        high=MOST_PROMPT, common=True,
    )  # fmt: skip
    resident: float = option(
        0.0, help="percentage of each layer's experts in VRAM", metavar="PERCENT", low=0, high=100, common=True
    )
    router: str = option(
        "uniform", help="routing; uniform: all experts equally likely; zipf: a few hot experts",
        choices=tuple(word for word in ROUTERS if word != "drift"), common=True,
    )  # fmt: skip
    mode: str = option(
        "auto", help="what computes the experts in RAM: as --prefill of `proa serve`",
        choices=("auto", "cpu", "stream"), common=True,
    )  # fmt: skip
    deterministic: bool = option(False, help="measure with --deterministic of `proa serve`")
    runs: int = option(5, help="prompts of each length; the median is reported, after three more that warm up", low=1)
    max_batch_tokens: int | None = option(
        None, help="most tokens computed at once; default: as `proa serve`", kind="tokens", low=1, high=1 << 20
    )
    engine: HybridEngineOptions = field(default_factory=HybridEngineOptions)


@dataclass(frozen=True)
class _Rates:
    """Measured before the engine started. gpu: None if it is simulated; ram: bytes/s that the CPU's workers read."""

    gpu: GpuRate | None
    ram: float


@dataclass(frozen=True)
class _Run:
    """One prompt: its time to first token, its tokens from the prefix cache, and the counters of prefill before and
    after it."""

    ttft_s: float
    cached: int
    before: PrefillStats
    after: PrefillStats


def run(options: PrefillOptions, report: Callable[[Result], None]) -> None:
    """Load the model, then measure each length and `report` each result. Raises ProaError."""
    notes, shape = busy_notes(), MODEL_SHAPES[options.shape].cut(options.layers)
    lengths = parse_numbers(options.tokens, "tokens", 2, MOST_PROMPT)
    need_gpu(options.engine.gpus)
    with shape.folder() as folder:
        asked = _engine_options(options, shape, lengths)
        prepared = prepare(shape.name, asked, opened=open_if_here(str(folder), asked.model))
        gpu_of(prepared.plan)  # raises if there is none
        beside = planned(prepared, asked)  # before the engine takes the GPU's memory
        ram = ram_rate(asked.machine, prepared.machine)
        speeds, predicted = beside.speeds(ram), dict[int, float]()
        if speeds is not None and not options.cached:
            predicted = {tokens: prefill(beside.plan, beside.work, speeds, tokens).seconds for tokens in lengths}
        measured = _Rates(beside.gpu, ram.bytes_per_s)
        asyncio.run(_measure_all(options, shape, lengths, predicted, prepared, measured, notes, report))


def _engine_options(options: PrefillOptions, shape: ModelShape, lengths: Sequence[int]) -> EngineOptions:
    gpus: GpuOptions = options.engine.gpus
    if gpus.gpu_experts == "auto" and gpus.gpu_resident_layers is None:
        gpus = replace(gpus, gpu_experts=str(round(shape.experts * options.resident / 100)))
    elif options.resident:
        raise UsageError(
            "--resident excludes --gpu-experts and --gpu-resident-layers.", "Give only one of these options."
        )
    if gpus.prefill != "auto":
        raise UsageError(f"--prefill {gpus.prefill} has no effect here.", f"Use --mode {gpus.prefill}.")
    page_tokens = CacheOptions().page_tokens
    tokens = options.cached + max(lengths) + 1
    pages = -(-tokens // page_tokens) + 1
    spec = declare(shape.config()).spec
    kv_bytes = spec.kv_bytes_per_token(KV_ELEM_BYTES["bfloat16"])
    return EngineOptions(
        model=ModelOptions(
            dtype="bfloat16", load_format="dummy", dummy_router=options.router, dummy_format=options.format
        ),
        # twice: the prefix stays, and each prompt takes the pages of the one before
        cache=CacheOptions(
            context=tokens,
            kv_memory=2 * pages * page_tokens * kv_bytes,
            page_tokens=page_tokens,
            prefix_cache=options.cached > 0,
        ),
        scheduler=SchedulerOptions(
            max_running=4, max_batch_tokens=options.max_batch_tokens, deterministic=options.deterministic
        ),
        machine=options.engine.machine,
        gpus=replace(gpus, prefill=options.mode),
    )


async def _measure_all(
    options: PrefillOptions, shape: ModelShape, lengths: Sequence[int], predicted: Mapping[int, float],
    prepared: Prepared, rates: _Rates, notes: Sequence[str], report: Callable[[Result], None],
) -> None:  # fmt: skip
    """predicted: by length, seconds to the first token; empty with a cached prefix, or if rates are unknown."""
    engine = await EngineClient.launch(prepared.plan, own_thread=True)
    try:
        ready = await engine.wait_ready()
        rows = (*prepared.plan.decisions, *ready.decisions)
        decided = [f"{row.name}: {row.got} ({row.why})" for row in rows if row.name in ("prefill", "prefill rates")]
        for tokens in lengths:
            runs = await _measure(engine, options, shape.vocab, tokens)
            figures = _figures(options, prepared, rates, tokens, runs[WARM_UP:])
            figures["first_ttft_s"] = runs[0].ttft_s
            figures["vram_peak_bytes"] = vram_taken(gpu_of(prepared.plan))
            figures["predicted_ttft_s"] = predicted.get(tokens)
            found = _cached_notes(options.cached, figures["cached_tokens"] or 0)
            report(result("prefill", QUESTION, shape.name, options, figures, notes=(*notes, *decided, *found)))
    finally:
        await engine.close()


async def _measure(engine: EngineHandle, options: PrefillOptions, vocab: int, tokens: int) -> list[_Run]:
    """Measure prompts of this length, those that warm up included: the cached prefix, if there is one, then new tokens
    that no other prompt has."""
    (prefix,) = random_prompts(vocab, 1, options.cached) if options.cached else ([],)
    prompts = random_prompts(vocab, options.runs + WARM_UP, tokens, seed=tokens)
    if prefix:
        await _first_token(engine, prefix, "prefix")
    runs = []
    for number, prompt in enumerate(prompts):
        before = engine.stats.prefill
        ttft_s, cached = await _first_token(engine, prefix + prompt, f"{tokens} {number}")
        runs.append(_Run(ttft_s, cached, before, engine.stats.prefill))
    return runs


def _cached_notes(asked: int, cached: float) -> tuple[str, ...]:
    """A note if the prefix cache gave fewer tokens than asked for: it has whole pages, states at some places, and with
    --deterministic whole cells."""
    if cached >= asked:
        return ()
    return (f"{cached:.0f} of the {asked} tokens of --cached came from the prefix cache; the others were computed",)


async def _first_token(engine: EngineHandle, prompt: list[int], name: str) -> tuple[float, int]:
    """Return the seconds to the first token, and how many tokens came from the prefix cache; only one is generated.
    Raises ProaError if there is none."""
    begin, took_s, cached = time.perf_counter(), None, 0
    async with aclosing(engine.generate(greedy(name, prompt, 1))) as events:
        async for event in events:
            if event.error:
                raise ProaError(f"The engine generated no token: {event.error}", "Report this as a bug.")
            took_s, cached = took_s or time.perf_counter() - begin, event.cached_tokens or cached
    if took_s is None:
        raise ProaError("The engine generated no token.", "Report this as a bug.")
    return took_s, cached


def _figures(
    options: PrefillOptions, prepared: Prepared, measured: _Rates, tokens: int, runs: Sequence[_Run]
) -> dict[str, float | None]:
    plan, gpu, rates = prepared.plan, gpu_of(prepared.plan), measured.gpu
    one = sorted(runs, key=lambda run: run.ttft_s)[len(runs) // 2]
    now = runs[-1].after
    copies = now.copy_bytes_per_s or gpu.pcie_bytes_per_s or 0.0  # 0: unknown, nothing was copied
    upload = copies if rates is None else rates.pcie_bytes_per_s
    shape = Shape.of(prepared.declared.spec, gpu)
    streamed, left = (getattr(one.after, name) - getattr(one.before, name) for name in ("streamed", "left_to_cpu"))
    pcie_s = shape.in_ram_bytes / upload if upload else None
    own_s = one.after.own_seconds - one.before.own_seconds
    experts_s = one.after.experts_seconds - one.before.experts_seconds
    computed = tokens + options.cached - one.cached
    operations = shape.flops(computed, one.cached)
    flops = None if rates is None else rates.flops_per_s_for(operations)
    chunks = -(-computed // plan.max_batch_tokens)
    launches = chunks * sum(in_ram > 0 for _, in_ram, _, _ in shape.layers)
    cpu, own_each_s = CpuExpertCost(now.cpu_expert_seconds, now.cpu_pair_seconds), own_s / max(1, launches)
    limits = Limits(upload, cpu, measured.ram, flops, own_each_s, chunks)
    bound, overlapped = (
        bound_s(shape, computed, one.cached, options.router, limits, in_turn=in_turn) for in_turn in (True, False)
    )
    return {
        "tokens": float(tokens),
        "cached_tokens": float(one.cached),
        "ttft_s": one.ttft_s,
        "ttft_s_least": min(run.ttft_s for run in runs),
        "ttft_s_most": max(run.ttft_s for run in runs),
        "ttft_s_median": median(run.ttft_s for run in runs),
        "tokens_per_s": computed / one.ttft_s,
        "bound_s": bound,
        "bound_share": None if bound is None else bound / one.ttft_s,
        "overlapped_bound_s": overlapped,
        "pcie_s": pcie_s,
        "pcie_share": None if pcie_s is None else pcie_s / one.ttft_s,
        "flops_s": None if flops is None else operations / flops,
        "streamed_share": streamed / (streamed + left) if streamed + left else None,
        "streamed_bytes": float(one.after.streamed_bytes - one.before.streamed_bytes),
        "copy_s": one.after.copy_seconds - one.before.copy_seconds,
        "gpu_own_s": own_s,
        "gpu_experts_s": experts_s,
        "copy_wait_s": one.after.waited_seconds - one.before.waited_seconds,
        "cpu_wait_s": one.after.cpu_wait_seconds - one.before.cpu_wait_seconds,
        "gpu_idle_share": _idle_share(own_s + experts_s, one),
        "decided_s": one.after.decided_seconds - one.before.decided_seconds,
        "routed": float(one.after.routed - one.before.routed),
        "prediction_error": prediction_error(one.before, one.after),
        "upload_bytes_per_s": upload or None,
        "copy_bytes_per_s": now.copy_bytes_per_s or None,
        "ram_bytes_per_s": measured.ram,
        "cpu_expert_us": 1e6 * now.cpu_expert_seconds or None,
        "cpu_pair_us": 1e6 * now.cpu_pair_seconds or None,
        "flops_per_s": flops,
        "burst_flops_per_s": None if rates is None else rates.flops_per_s,
        "ring_bytes": float(gpu.ring_bytes),
        "vram_planned_bytes": float(gpu.vram.used_bytes),
        "max_batch_tokens": float(plan.max_batch_tokens),
    }


def _idle_share(busy_s: float, run: _Run) -> float | None:
    """The share of the time to first token in which the GPU computed nothing; None if its times were not measured,
    because the CPU computed all experts."""
    return 1 - busy_s / run.ttft_s if busy_s else None
