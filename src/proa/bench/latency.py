"""`proa bench latency`: time to first token and time per output token of one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import msgspec

from proa.bench.asked import need_context
from proa.bench.endpoint import open_endpoint
from proa.bench.limit import RamReadings, busy_notes, excess_notes, ram_meter
from proa.bench.predicted import measured_rates, predicted_figures
from proa.bench.prompts import TEXT, distinct_prompts
from proa.bench.result import MeasuredRoof, Result, result
from proa.bench.timing import Timing, spread_ms, stage_us
from proa.config.field import option
from proa.config.options import EngineOptions
from proa.engine.processes.early import EarlyProcess
from proa.engine.stats import Stats
from proa.errors import ProaError
from proa.llm import AsyncLLM
from proa.plan.plan import Plan
from proa.plan.prepare import prepare
from proa.plan.roof import roof_at
from proa.plan.work import Work, planned_work
from proa.types import SamplingParams

QUESTION = "How long does one request wait?"


@dataclass(frozen=True)
class LatencyOptions:
    """Options of `proa bench latency`."""

    model: str = option(
        "demo", help="model to load; with --url: the model's name in that API", metavar="MODEL", common=True
    )
    url: str | None = option(None, help="measure this running server instead", metavar="URL", common=True)
    allow_remote: bool = option(False, help="allow a --url that is not on this machine")
    api_key: str | None = option(None, help="bearer token for --url", metavar="KEY", secret=True)
    prompt_tokens: int = option(128, help="length of each prompt", kind="tokens", low=2, high=1 << 30, common=True)
    output_tokens: int = option(64, help="length of each answer", kind="tokens", low=2, high=1 << 30, common=True)
    runs: int = option(5, help="number of timed requests, one after another", low=1, high=100_000, common=True)
    warmup: int = option(1, help="number of untimed requests before them", low=0, high=1000)
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class Target:
    """The engine or server to measure. ask(prompt): runs one request with exactly --output-tokens tokens. plan, work:
    None for a server."""

    model: str
    text_tokens: list[int]
    ask: Callable[[list[int]], Awaitable[Timing]]
    plan: Plan | None = None
    work: Work | None = None


def run(options: LatencyOptions) -> Result:
    """Load the model (or connect to --url), warm up, time `runs` requests. Raises ProaError."""
    return asyncio.run(_run(options))


async def _run(options: LatencyOptions) -> Result:
    notes = busy_notes()
    opened = _engine(options) if options.url is None else _server(options, options.url)
    async with opened as target:
        return await measure(target, options, notes)


async def measure(target: Target, options: LatencyOptions, notes: tuple[str, ...] = ()) -> Result:
    """Time requests one after another; for an engine, measure RAM bandwidth before and after them."""
    prompts = distinct_prompts(target.text_tokens, options.warmup + options.runs, options.prompt_tokens)
    for prompt in prompts[: options.warmup]:
        await target.ask(prompt)
    timed = prompts[options.warmup :]
    if target.plan is None:
        figures = latency_figures([await target.ask(prompt) for prompt in timed])
        return result("latency", QUESTION, target.model, options, figures, notes=(*notes, _NO_ROOF))
    readings = RamReadings(ram_meter(options.engine.machine))
    figures = latency_figures([await readings.measure_run(partial(target.ask, prompt)) for prompt in timed])
    await readings.read()
    context_tokens = options.prompt_tokens + options.output_tokens // 2
    expected = roof_at(target.plan, context_tokens)
    roof = MeasuredRoof(
        bytes_per_token=expected.bytes_per_token,
        vram=expected.vram,
        bandwidth_bytes_per_s=readings.typical,
        readings_bytes_per_s=readings.all_bytes_per_s,
    )
    rate = figures["decode_tokens_per_s"]
    share = None if rate is None else rate / roof.tokens_per_s
    figures |= {"roof_tokens_per_s": roof.tokens_per_s, "roof_share": share}
    ram = msgspec.structs.replace(readings.rates[-1], bytes_per_s=readings.typical)
    rates = measured_rates(target.plan, options.engine, ram)
    if target.work is not None and rates is not None:
        lengths = {"prompt_tokens": options.prompt_tokens, "context_tokens": context_tokens}
        figures |= predicted_figures(target.plan, target.work, rates, **lengths)
    all_notes = (*notes, *readings.notes(), *excess_notes(share, readings.all_bytes_per_s))
    return result("latency", QUESTION, target.model, options, figures, roof=roof, notes=all_notes)


_NO_ROOF = "no roof: the bytes that a server reads per token are unknown; to get a roof, measure without --url"


def latency_figures(timings: Sequence[Timing]) -> dict[str, float | None]:
    """Compute time to first token (prefill and all overheads), time per further token, both as rates, and the parts of
    a decode step's time in the engine."""
    per_token = [t.tpot_s for t in timings if t.tpot_s is not None]
    return {
        **spread_ms("ttft", (t.ttft_s for t in timings)),
        **spread_ms("tpot", per_token),
        **spread_ms("itl", (gap for t in timings for gap in t.gaps_s)),
        "prefill_tokens_per_s": median(t.prompt_tokens / t.ttft_s for t in timings),
        "decode_tokens_per_s": 1 / median(per_token) if per_token else None,
        **stage_us(timings),
        "cached_prompt_tokens": float(sum(t.cached_tokens or 0 for t in timings)),
    }


@asynccontextmanager
async def _server(options: LatencyOptions, url: str) -> AsyncIterator[Target]:
    async with open_endpoint(
        url, options.model, api_key=options.api_key, allow_remote=options.allow_remote
    ) as endpoint:

        async def ask(prompt: list[int]) -> Timing:
            return await endpoint.complete(prompt, options.output_tokens)

        yield Target(endpoint.model, await endpoint.tokenize(TEXT), ask)


@asynccontextmanager
async def _engine(options: LatencyOptions) -> AsyncIterator[Target]:
    asked = options.engine
    lengths = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    with EarlyProcess() as early:
        prepared = await asyncio.to_thread(prepare, options.model, asked, when_measured=early.begin)
        need_context(prepared.plan, lengths)
        llm = await AsyncLLM.launch_prepared(prepared, asked, early=early, own_thread=True)
    try:
        await llm.engine.wait_ready()
        work = planned_work(llm.plan, asked.model, prepared.declared, prepared.checkpoint)
        yield replace(engine_target(llm, options.output_tokens), work=work)
    finally:
        await llm.close()


def engine_target(llm: AsyncLLM, output_tokens: int) -> Target:
    """Make the Target of an engine in this program, without HTTP."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)

    async def ask(prompt: list[int]) -> Timing:
        start_s = time.perf_counter()
        arrivals: list[float] = []
        stats: list[Stats] = []
        made, cached = 0, None
        async for chunk in llm.stream(prompt, params):
            if chunk.tokens:
                arrivals.append(time.perf_counter())
                stats.append(llm.engine.stats)
            made += len(chunk.tokens)
            cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
        if made != output_tokens:
            raise ProaError(f"The engine generated {made} tokens instead of {output_tokens}.", "Report this as a bug.")
        return Timing(start_s, tuple(arrivals), len(prompt), made, cached, tuple(stats))

    return Target(llm.model_name, llm.tokenize(TEXT), ask, llm.plan)
