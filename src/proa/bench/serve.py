"""`proa bench serve`: throughput and latency of a running server under concurrent HTTP requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import msgspec

from proa.bench.endpoint import Endpoint, open_endpoint
from proa.bench.limit import RamReadings, busy_notes, ram_meter
from proa.bench.predicted import Planned, predicted_throughput, rates_used
from proa.bench.prompts import TEXT, distinct_prompts
from proa.bench.result import Result, result
from proa.bench.timing import Timing, spread_ms
from proa.config.field import option
from proa.config.options import EngineOptions
from proa.errors import ProaError

QUESTION = "What throughput does the server reach?"


@dataclass(frozen=True)
class ServeBenchOptions:
    """Options of `proa bench serve`."""

    model: str = option(
        "demo", help="model to serve; with --url: the model's name in that API", metavar="MODEL", common=True
    )
    url: str | None = option(None, help="send the requests to this running server instead", metavar="URL", common=True)
    allow_remote: bool = option(False, help="allow a --url that is not on this machine")
    api_key: str | None = option(None, help="bearer token for --url", metavar="KEY", secret=True)
    requests: int = option(32, help="number of timed requests", low=1, high=100_000, common=True)
    concurrency: int = option(4, help="most concurrent requests", low=1, high=4096, common=True)
    rate: float | None = option(
        None, help="requests per second, with Poisson arrivals; default: send the next request when one ends",
        metavar="PER_S", low=0.001, high=100_000, common=True,
    )  # fmt: skip
    input_tokens: int = option(256, help="length of each prompt", kind="tokens", low=2, high=1 << 30, common=True)
    output_tokens: int = option(64, help="length of each answer", kind="tokens", low=2, high=1 << 30, common=True)
    warmup: int = option(1, help="number of untimed requests before them", low=0, high=1000)
    timeout_s: float = option(600.0, help="seconds without data after which a request has failed", low=1, high=86400)
    engine: EngineOptions = field(default_factory=EngineOptions)


def run(options: ServeBenchOptions, url: str, planned: Planned | None = None) -> Result:
    """Send the requests to the server at `url`. planned: of that server; None: its plan is unknown. Raises ProaError if
    it is unreachable or every request fails."""
    return asyncio.run(_run(options, url, planned))


async def _run(options: ServeBenchOptions, url: str, planned: Planned | None) -> Result:
    notes = busy_notes()
    async with open_endpoint(
        url, options.model, api_key=options.api_key, timeout_s=options.timeout_s, allow_remote=options.allow_remote
    ) as endpoint:
        text = await endpoint.tokenize(TEXT)
        prompts = distinct_prompts(text, options.warmup + options.requests, options.input_tokens)
        for prompt in prompts[: options.warmup]:
            await endpoint.complete(prompt, options.output_tokens)
        send = partial(_load, endpoint, prompts[options.warmup :], options)
        readings = None if planned is None else RamReadings(ram_meter(options.engine.machine))
        outcomes = await (send() if readings is None else readings.measure_run(send))
        predicted, about = await _predicted(options, planned, readings)
    timings = [outcome for outcome in outcomes if isinstance(outcome, Timing)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, ProaError)]
    if not timings:
        raise failures[0]
    errors = dict(Counter(str(failure) for failure in failures))
    figures = serve_figures(timings, len(failures)) | predicted
    return result("serve", QUESTION, endpoint.model, options, figures, errors=errors, notes=(*notes, *about))


_NO_PLAN = "no prediction: the plan of a running server is unknown; to get one, measure without --url"
_NO_RATE = "no prediction: with --rate the arrivals decide how many requests run at once"


async def _predicted(
    options: ServeBenchOptions, planned: Planned | None, readings: RamReadings | None
) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Predicted figures and notes, after the requests. readings: taken before them; None: the plan is unknown."""
    if planned is None or readings is None:
        return {}, (_NO_PLAN,)
    if options.rate is not None:
        return {}, (_NO_RATE,)
    await readings.read()
    speeds = planned.speeds(msgspec.structs.replace(readings.rates[-1], bytes_per_s=readings.typical))
    if speeds is None:
        return {}, readings.notes()
    figures = predicted_throughput(
        planned.plan, planned.work, speeds, requests=options.requests, concurrency=options.concurrency,
        input_tokens=options.input_tokens, output_tokens=options.output_tokens,
    )  # fmt: skip
    return figures | rates_used(speeds), readings.notes()


async def _load(
    endpoint: Endpoint, prompts: Sequence[list[int]], options: ServeBenchOptions
) -> list[Timing | ProaError]:
    """Send each prompt once, at most `concurrency` at a time; return each request's timing or error.

    With a rate, a request's start time is its due time: waiting for a free slot counts as latency, as for a user.
    """
    places = asyncio.Semaphore(options.concurrency)
    begin_s = time.perf_counter()

    async def one(prompt: list[int], due_s: float) -> Timing | ProaError:
        await asyncio.sleep(due_s)
        async with places:
            try:
                start_s = begin_s + due_s if options.rate else None
                return await endpoint.complete(prompt, options.output_tokens, start_s)
            except ProaError as error:
                return error

    due = arrival_times(len(prompts), options.rate)
    return await asyncio.gather(*(one(*pair) for pair in zip(prompts, due, strict=True)))


def arrival_times(count: int, rate_per_s: float | None, seed: int = 0) -> list[float]:
    """Return the due times of requests in seconds from the start: all 0 without a rate, else Poisson arrivals, equal in
    every run."""
    if rate_per_s is None:
        return [0.0] * count
    intervals = random.Random(seed)
    return list(accumulate((intervals.expovariate(rate_per_s) for _ in range(count - 1)), initial=0.0))


def serve_figures(timings: Sequence[Timing], failed: int) -> dict[str, float | None]:
    """Compute throughput, from the first request's start to the last token of all, and latencies."""
    duration_s = max(t.arrivals_s[-1] for t in timings) - min(t.start_s for t in timings)
    made = sum(t.output_tokens for t in timings)
    read = sum(t.prompt_tokens for t in timings)
    return {
        "completed_requests": float(len(timings)),
        "failed_requests": float(failed),
        "duration_s": duration_s,
        "requests_per_s": len(timings) / duration_s,
        "output_tokens_per_s": made / duration_s,
        "total_tokens_per_s": (made + read) / duration_s,
        **spread_ms("ttft", (t.ttft_s for t in timings)),
        **spread_ms("tpot", (t.tpot_s for t in timings)),
        **spread_ms("itl", (gap for t in timings for gap in t.gaps_s)),
        **spread_ms("e2e", (t.e2e_s for t in timings)),
        "cached_prompt_tokens": float(sum(t.cached_tokens or 0 for t in timings)),
    }
