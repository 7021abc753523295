"""`proa bench restart`: a server is killed and started again, and a shared prefix is restored from files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from proa.bench.asked import need_context
from proa.bench.endpoint import Endpoint, open_endpoint
from proa.bench.limit import busy_notes
from proa.bench.predicted import Planned, planned, predicted_restart, rates_used
from proa.bench.prompts import TEXT, distinct_prompts
from proa.bench.result import Result, result
from proa.cache.keys import run_pages
from proa.config.field import option
from proa.config.options import EngineOptions
from proa.errors import ProaError, UsageError
from proa.plan.prefix_files import ROW
from proa.plan.prepare import prepare, ram_rate
from proa.plan.speeds import Speeds

QUESTION = "How quickly does a restarted server answer a prompt whose prefix it had stored?"
LIMIT_S = 120.0  # for storing the prefix
QUIET_S = 2.0  # without a new file: copies of recurrent states are stored too
OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class RestartOptions:
    """Options of `proa bench restart`."""

    model: str = option("demo", help="model to serve", metavar="MODEL", common=True)
    prefix_tokens: int = option(
        4096, help="length of the shared prefix", kind="tokens", low=256, high=1 << 30, common=True
    )
    suffix_tokens: int = option(
        64, help="length of each prompt's own end", kind="tokens", low=2, high=1 << 20, common=True
    )
    runs: int = option(5, help="number of timed prompts with the prefix in memory", low=1, high=1000, common=True)
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class _Before:
    """Measured with the first server. wrote_s: from the first request's end until the last file was found stored."""

    computed_ttft_s: float
    hit_logprobs: list[float]
    wrote_s: float


Start = Callable[[], AbstractContextManager[dict[str, Any]]]


def run(options: RestartOptions, folder: Path, start: Start, start_killed: Start) -> Result:
    """Measure. folder: of the prefix cache. start, start_killed: run a server with that folder until the block ends and
    yield its report; the second one ends by SIGKILL. Raises ProaError."""
    notes = busy_notes()
    beside, speeds = _planned(options)  # no server has the memory yet
    lengths = {"prefix_tokens": options.prefix_tokens, "suffix_tokens": options.suffix_tokens}
    need_context(beside.plan, lengths, OUTPUT_TOKENS)
    with start_killed() as report:
        _keeps_files(report)
        before = asyncio.run(_first(options, folder, report["url"]))
    files = sorted(folder.glob("*.kv"))
    _drop_from_page_cache(files)
    with start() as report:
        figures = asyncio.run(_second(options, report["url"], before))
    file_rate = _read_rate(files)
    rate = figures["restored_bytes_per_s"]
    figures |= {
        "files": float(len(files)),
        "file_bytes_per_s": file_rate,
        "restored_share_of_file_rate": None if rate is None else rate / file_rate,
    }
    restore_s = (figures["restored_bytes"] or 0.0) / file_rate  # as the engine predicts it, by the rate of this run
    figures["predicted_restore_ms"] = 1e3 * restore_s
    if speeds is not None:
        figures |= predicted_restart(beside.plan, beside.work, speeds, **lengths, restore_s=restore_s)
        figures |= rates_used(speeds)
    return result("restart", QUESTION, options.model, options, figures, notes=notes)


def _keeps_files(report: dict[str, Any]) -> None:
    """Raise UsageError if the server's plan keeps no prefix in files: none would ever be stored."""
    for row in report["decisions"]:
        if row["name"] == ROW and row["got"] == "none":
            raise UsageError(f"The server keeps no prefix in files: {row['why']}.", "Change these options.")


def _planned(options: RestartOptions) -> tuple[Planned, Speeds | None]:
    """The servers' plan, but for the files, and this machine's rates, measured now; None as by Planned.speeds."""
    cache = replace(options.engine.cache, prefix_cache_dir=None, prefix_cache_disk=None)
    asked = replace(options.engine, cache=cache)
    prepared = prepare(options.model, asked)
    found = planned(prepared, asked)
    return found, found.speeds(ram_rate(asked.machine, prepared.machine))


async def _first(options: RestartOptions, folder: Path, url: str) -> _Before:
    async with open_endpoint(url, options.model) as endpoint:
        prompts = await _prompts(endpoint, options)
        computed = await endpoint.complete(prompts[0], OUTPUT_TOKENS)
        ended_s = time.perf_counter()
        logprobs = await endpoint.logprobs(prompts[1], OUTPUT_TOKENS)
        size = options.engine.cache.page_tokens
        wrote_s = await _stored(folder, options.prefix_tokens // (run_pages(size) * size))
        return _Before(computed.ttft_s, logprobs, wrote_s - ended_s)


async def _stored(folder: Path, least: int) -> float:
    """Wait until the folder has at least so many files, and no more come. Returns when the last one was seen. Raises
    ProaError."""
    began_s, seen = time.perf_counter(), 0
    changed_s = began_s
    while True:
        count, now_s = len(list(folder.glob("*.kv"))), time.perf_counter()
        if count != seen:
            seen, changed_s = count, now_s
        if count >= least and now_s - changed_s > QUIET_S:
            return changed_s
        if now_s - began_s > LIMIT_S:
            raise ProaError(f"The prefix was not stored within {LIMIT_S:.0f} s.", "Use a faster disk.")
        await asyncio.sleep(0.05)


async def _second(options: RestartOptions, url: str, before: _Before) -> dict[str, float | None]:
    async with open_endpoint(url, options.model) as endpoint:
        prompts = await _prompts(endpoint, options)
        await endpoint.complete(prompts[-1][-options.suffix_tokens :], OUTPUT_TOKENS)  # warms up
        restored = await endpoint.complete(prompts[0], OUTPUT_TOKENS)
        metrics = await endpoint.metrics()
        logprobs = await endpoint.logprobs(prompts[1], OUTPUT_TOKENS)
        hits = [await endpoint.complete(prompt, OUTPUT_TOKENS) for prompt in prompts[2:-1]]
    hit_s = median(hit.ttft_s for hit in hits)
    took_s = metrics["proa_prefix_file_restore_seconds_total"]
    nbytes = metrics["proa_prefix_file_restored_bytes_total"]
    cached = restored.cached_tokens or 0
    return {
        "prefix_tokens": float(options.prefix_tokens),
        "cached_tokens": float(cached),
        "cached_share": min(1.0, cached / options.prefix_tokens),
        "computed_ttft_ms": 1e3 * before.computed_ttft_s,
        "restored_ttft_ms": 1e3 * restored.ttft_s,
        "hit_ttft_ms": 1e3 * hit_s,
        "restore_ms": 1e3 * took_s,
        "ttft_over_restore_and_hit": restored.ttft_s / (took_s + hit_s),
        "written_after_ms": 1e3 * before.wrote_s,
        "restored_bytes": nbytes,
        "restored_bytes_per_s": nbytes / took_s if took_s else None,
        "logprob_difference": max(abs(a - b) for a, b in zip(logprobs, before.hit_logprobs, strict=True)),
    }


async def _prompts(endpoint: Endpoint, options: RestartOptions) -> list[list[int]]:
    """Prompts with the same prefix and different ends: one is computed and restored, one compared, `runs` are hits, and
    one warms up. Both servers get the same."""
    text = await endpoint.tokenize(TEXT)
    (prefix,) = distinct_prompts(text, 1, options.prefix_tokens)
    return [[*prefix, *end] for end in distinct_prompts(text, options.runs + 3, options.suffix_tokens)]


def _drop_from_page_cache(files: list[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(files: list[Path]) -> float:
    """Bytes/s of reading the files one after another from the disk, without using them."""
    _drop_from_page_cache(files)
    buffer, nbytes, began_s = bytearray(16 << 20), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                nbytes += count
    return nbytes / (time.perf_counter() - began_s)
