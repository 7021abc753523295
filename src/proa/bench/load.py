"""`proa bench load`: speed of loading a model whose files are in the page cache. Disks are not measured."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from proa.bench.limit import busy_notes
from proa.bench.result import Result, result
from proa.config.field import option
from proa.config.options import EngineOptions
from proa.engine.ipc import Ready
from proa.engine.processes.client import EngineClient
from proa.errors import UsageError
from proa.native.arena import Arena
from proa.plan.plan import Plan
from proa.plan.prepare import prepare

QUESTION = "How fast is a model loaded from cached files into memory?"
_READ_BYTES = 256 << 10  # bytes per read call, as in the loader
_WRITE_BYTES = 2 << 20  # of new memory at a time: a huge page
_MOST_NEW_BYTES = 2 << 30
# A virtual machine may give freed memory back to its host after 2 s (free page reporting), and writes it several times
# more slowly then. Engines load later than that after the memory of a former one was freed.
_GIVEN_BACK_S = 3.0


@dataclass(frozen=True)
class LoadOptions:
    """Options of `proa bench load`."""

    model: str = option("demo", help="model to load", metavar="MODEL", common=True)
    runs: int = option(3, help="number of loads, each in a new engine process", low=1, high=1000, common=True)
    engine: EngineOptions = field(default_factory=EngineOptions)


def run(options: LoadOptions) -> Result:
    """Read the files into the page cache, then load the model `runs` times, each in a new engine process. Raises
    ProaError."""
    notes = busy_notes()
    prepared = prepare(options.model, options.engine)
    checkpoint = prepared.checkpoint
    if not checkpoint.tensors:
        raise UsageError("Dummy weights have no files to load.", "Leave out --load-format dummy.")
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    read_files(files, prepared.plan.threads)  # brings them into the page cache
    read = max(read_files(files, prepared.plan.threads) for _ in range(2))
    loads = [asyncio.run(_load(prepared.plan)) for _ in range(options.runs)]
    figures = load_figures(loads, checkpoint.tensor_bytes, prepared.plan.threads, read)
    if prepared.plan.gpus or not prepared.plan.isa:
        notes = (*notes, _NO_PREDICTION)
    else:
        kept_bytes = prepared.plan.memory.weights_bytes
        written = max(_write_rate(kept_bytes, prepared.plan.threads) for _ in range(2))
        figures |= predicted_load(checkpoint.tensor_bytes, kept_bytes, read, written)
    return result("load", QUESTION, prepared.plan.model, options, figures, notes=notes)


_NO_PREDICTION = "no prediction: neither copies to a GPU nor conversions by plain torch are measured"


def predicted_load(
    stored_bytes: int, kept_bytes: int, read_bytes_per_s: float, written_bytes_per_s: float
) -> dict[str, float | None]:
    """Seconds in which the files are read and new memory is written, one after the other, as each worker does. What
    conversions and the work for each tensor take is not counted."""
    return {
        "new_memory_gbytes_per_s": written_bytes_per_s / 1e9,
        "predicted_load_s": stored_bytes / read_bytes_per_s + kept_bytes / written_bytes_per_s,
    }


def _write_rate(kept_bytes: int, threads: int) -> float:
    """Measure the bytes/s at which new memory is written: as much as the weights take, but at most _MOST_NEW_BYTES.
    Waits first, so that freed memory is in the state in which an engine finds it."""
    time.sleep(_GIVEN_BACK_S)
    return write_new(min(kept_bytes, _MOST_NEW_BYTES), threads)


async def _load(plan: Plan) -> Ready:
    engine = await EngineClient.launch(plan)
    try:
        return await engine.wait_ready()
    finally:
        await engine.close()


def load_figures(
    loads: Iterable[Ready], stored_bytes: int, threads: int, read_bytes_per_s: float
) -> dict[str, float | None]:
    """Compute rates by the files' bytes. The fastest load gives the rates, as other programs can only slow loads
    down."""
    done = list(loads)
    seconds = [ready.load_seconds for ready in done]
    best = stored_bytes / min(seconds) / 1e9
    return {
        "load_s": min(seconds),
        "load_median_s": median(seconds),
        "stored_gbytes": stored_bytes / 1e9,
        "packed_gbytes": done[0].weights_bytes / 1e9,
        "stored_gbytes_per_s": best,
        "of_each_thread_gbytes_per_s": best / threads,
        "file_reads_gbytes_per_s": read_bytes_per_s / 1e9,
        "read_share": best * 1e9 / read_bytes_per_s,
        "peak_rss_gbytes": max(ready.peak_rss_bytes for ready in done) / 1e9,
    }


def read_files(files: Iterable[Path], threads: int) -> float:
    """Read the files with `threads` threads and discard the data; return bytes per second."""
    begin = time.perf_counter()
    done = 0
    for file in files:
        with file.open("rb", buffering=0) as opened, ThreadPoolExecutor(threads) as pool:
            starts = itertools.count(0, _READ_BYTES)  # shared by the threads: next() is atomic under the GIL
            done += sum(pool.map(_read, itertools.repeat(opened.fileno(), threads), itertools.repeat(starts)))
    return done / (time.perf_counter() - begin)


def _read(fd: int, starts: Iterable[int]) -> int:
    """Read blocks of the file at offsets from `starts` until its end; return the number of bytes read."""
    buffer, done = bytearray(_READ_BYTES), 0
    for start in starts:
        got = os.preadv(fd, [buffer], start)
        if not got:
            break
        done += got
    return done


def write_new(nbytes: int, threads: int) -> float:
    """Write new memory of this size, on pages as those of weights, with `threads` threads; return bytes per second.
    Raises ResourceError."""
    source = np.ones(_WRITE_BYTES, np.uint8)
    with Arena(nbytes) as arena, ThreadPoolExecutor(threads) as pool:
        starts = itertools.count(0, _WRITE_BYTES)  # shared by the threads, as in read_files

        def write(_: int) -> None:
            for start in starts:
                if start >= nbytes:
                    return
                to = np.frombuffer(arena.view(start, min(_WRITE_BYTES, nbytes - start)), np.uint8)
                np.copyto(to, source[: to.size])

        begin = time.perf_counter()
        list(pool.map(write, range(threads)))
        took_s = time.perf_counter() - begin
    return nbytes / took_s
