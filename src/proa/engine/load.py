"""Plan -> a running Engine: build, load, allocate, in that order. Never: decisions, processes."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache
from proa.engine.engine import Engine
from proa.engine.ipc import Loading, Ready
from proa.engine.policy import Limits
from proa.engine.runner import Runner
from proa.engine.scheduler import Scheduler
from proa.engine.threads import choose_threads
from proa.layers.decoder import Decoder
from proa.ops.select import select
from proa.plan.plan import Plan
from proa.weights.checkpoint import open_checkpoint
from proa.weights.dummy import fill_dummy
from proa.weights.load import load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
REPORT_EVERY_S = 0.1
PREFILL_TRIAL_TOKENS = 32  # enough to be bound by arithmetic, few enough to take a moment


def load_engine(plan: Plan, report: Callable[[Loading], None]) -> tuple[Engine, Ready]:
    """Load the planned model. Raises ModelError and ResourceError."""
    torch.set_num_threads(plan.threads)
    torch.set_flush_denormal(True)
    checkpoint = open_checkpoint(Path(plan.path), plan.load_format, plan.override_config)
    declared = checkpoint.declare(plan.ignore_config_keys)
    chosen = select()
    dtype = DTYPES[plan.dtype]
    model = Decoder(declared.spec, chosen.ops, dtype)
    targets = dict(model.parameters())
    begin = time.perf_counter()
    if plan.load_format == "dummy":
        fill_dummy(declared.spec, targets, plan.dummy_seed, plan.dummy_router)
    else:
        load_weights(checkpoint, declared, targets, _paced(report))
    load_seconds = time.perf_counter() - begin
    runner = Runner(model, plan.num_pages, plan.page_tokens, dtype)
    choose_threads(runner, plan.threads, min(PREFILL_TRIAL_TOKENS, plan.num_pages * plan.page_tokens))
    engine = Engine(runner, _scheduler(plan), declared.spec.vocab)
    gc.collect()
    gc.freeze()  # the model's objects live as long as the process: later collections need not look at them
    ready = Ready(
        load_seconds=load_seconds,
        weights_bytes=declared.spec.num_params * dtype.itemsize,
        ops=chosen.names,
        decode_threads=runner.decode_threads,
        prefill_threads=runner.prefill_threads,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return engine, ready


def _scheduler(plan: Plan) -> Scheduler:
    allocator = PageAllocator(plan.num_pages)
    prefix_cache = PrefixCache(plan.page_tokens, allocator) if plan.prefix_cache else None
    return Scheduler(Limits.of(plan), allocator, prefix_cache)


def _paced(report: Callable[[Loading], None]) -> Callable[[int, int], None]:
    """At most one report every REPORT_EVERY_S, with the time left at the rate so far."""
    begin = time.perf_counter()
    last = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < REPORT_EVERY_S and done_bytes < total_bytes:
            return
        last = now
        eta_s = (now - begin) / done_bytes * (total_bytes - done_bytes) if done_bytes else None
        report(Loading("loading weights", done_bytes, total_bytes, eta_s))

    return progress
