"""Rehearses models for an absent GPU, and prints counts of the kernels that they would compile as JSON. A separate
program, since pytest's process interprets kernels: python tests/rehearsed.py CASES, a JSON list of the arguments of
`case`.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
import triton.compiler
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key

from live_bytes import LiveBytes
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building import rehearsal
from proa.engine.building.compile_ahead import rehearsed, stored_types
from proa.engine.building.gpu_plan import top_k
from proa.engine.building.kept_variants import keep, key_of, read_kept
from proa.engine.executors.batch import Span, step_limits
from proa.engine.executors.parts import BlockByBlock, Chunk
from proa.machine.absent import with_gpu
from proa.machine.probe import probe
from proa.ops import ahead
from proa.plan import vram
from proa.plan.kernels import long_bytes
from proa.plan.prepare import Prepared
from proa.plan.ring import pass_bytes
from quick_plan import prepare

CAPABILITY = 90
SWEPT_ROWS = 64  # numbers of rows up to this one are rehearsed, and some larger ones


def planned(path: str, vram: int, **options: Any) -> Prepared:
    asked = from_keywords(EngineOptions, vram=vram, **options)
    return prepare(path, asked, machine=with_gpu(probe(), f"sm_{CAPABILITY}", vram))


class _Kernel:
    """Stands for a compiled kernel; has the attributes that a launch reads."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        pass

    def run(self, *args: object) -> None:
        pass


@contextmanager
def keys_of_compiler() -> Iterator[set[str]]:
    """Collect the disk-cache keys of all kernels that Triton is asked to compile in this context, without compiling."""
    keys: set[str] = set()

    def compile_nothing(src: Any, target: Any, options: dict[str, Any]) -> _Kernel:
        backend = make_backend(target)
        env = get_cache_invalidating_env_vars()
        keys.add(get_cache_key(src, backend, backend.parse_options(dict(options)), env_vars=env))
        return _Kernel()

    real = triton.compile
    triton.compile = triton.compiler.compile = compile_nothing
    try:
        yield keys
    finally:
        triton.compile = triton.compiler.compile = real


def launch(steps: Iterator[Callable[[], None]]) -> set[str]:
    """Disk-cache keys of the kernels that the steps' launches compile, computed by Triton's own launch path."""
    ahead._forget()
    triton.runtime.driver.set_active(ahead.TargetDriver(CAPABILITY))
    with keys_of_compiler() as keys:
        for step in steps:
            step()
    return keys


def stage_of(prepared: Prepared) -> rehearsal.Stage:
    """The whole model on the meta device."""
    plan, spec = prepared.plan, prepared.declared.spec
    assert plan.gpu is not None
    whole = rehearsal.Shown(spec, stored_types(plan, prepared.checkpoint, prepared.declared), plan.gpu)
    return rehearsal.Stage(plan, whole, top_k(spec), CAPABILITY)


def stage_with_weights(prepared: Prepared) -> rehearsal.Stage:
    """They are made when they are first used."""
    stage = stage_of(prepared)
    with keys_of_compiler(), torch.inference_mode():
        stage.prompt_after(0, 1, beside=False)
    return stage


def sweep(prepared: Prepared, some: random.Random, swept: int) -> Iterator[Callable[[], None]]:
    """Steps of the whole model with `swept` numbers of rows up to SWEPT_ROWS, with some larger ones, and some behind
    a past of any length."""
    plan = prepared.plan
    stage = stage_of(prepared)
    most = plan.max_batch_tokens
    small = range(1, min(SWEPT_ROWS, most) + 1)
    sizes = [*sorted(some.sample(small, min(swept, len(small)))), *(some.randint(1, most) for _ in range(12)), most]
    for rows in sizes:
        yield torch.inference_mode()(lambda rows=rows: stage.prompt(rows))
    for _ in range(4):
        rows = some.randint(1, min(most, plan.context_tokens))
        past, beside = some.randint(0, plan.context_tokens - rows), plan.prompts_may_run_beside and some.random() < 0.5
        yield torch.inference_mode()(partial(stage.prompt_after, past, rows, beside=beside))
    for bucket in step_limits(plan).decode_sizes(deterministic=plan.deterministic):
        yield torch.inference_mode()(lambda bucket=bucket: stage.decode(bucket))


def pass_in_vram(prepared: Prepared, stage: rehearsal.Stage, asked: EngineOptions) -> dict[str, int]:
    """As rows_in_vram, of the longest step in parts, whose chunks are computed block by block: bytes beside those of a
    chunk's rows."""
    plan, spec = prepared.plan, prepared.declared.spec
    tokens, hybrid = plan.pass_tokens, stage._hybrid
    starts = range(0, tokens, plan.max_batch_tokens)
    if hybrid.streaming is None or plan.cells is not None or len(starts) < 2:
        return {}
    hybrid.streaming.rates, hybrid.streaming.promotions = rehearsal._ALL_COPIES, None
    ends, counted = [min(start + plan.max_batch_tokens, tokens) for start in starts], LiveBytes()
    with keys_of_compiler(), torch.inference_mode(), counted:
        hybrid.begin_pass(tokens, len(starts))
        chunks = []
        for start, end in zip(starts, ends, strict=True):
            spans = (Span(range(end - start), start, (), end),)
            chunks.append(Chunk(start, *stage._on.step(stage._on.inputs, end - start, spans, beside_decode=False)))
        with hybrid.in_parts():
            parts = BlockByBlock(stage._model, chunks, {}, lambda first: nullcontext())
            parts.advance(1 << 30)
            whole = parts.hidden
        hybrid.end_pass()
    assert parts.done
    assert sum(map(len, whole)) == tokens
    groups = 2 if hybrid.passes_in_groups else 1
    return {
        "pass_bytes": counted.peak,
        "planned_pass_bytes": pass_bytes(spec, asked, tokens, plan.max_batch_tokens, groups),
    }


def rows_in_vram(prepared: Prepared, stage: rehearsal.Stage) -> dict[str, int]:
    """Bytes of the rows of the largest steps with prompts, behind no past and the longest, and those planned for them
    beside the experts' workspaces, which are made at the start."""
    plan, spec = prepared.plan, prepared.declared.spec
    stored = stored_types(plan, prepared.checkpoint, prepared.declared)
    rows, counted = min(plan.max_batch_tokens, plan.context_tokens), LiveBytes()
    with keys_of_compiler(), torch.inference_mode(), counted:
        for past in (0, plan.context_tokens - rows):
            stage.prompt_after(past, rows, beside=False)
    planned = vram.rows_bytes(spec, rows, vram.device_row_bytes(spec), stored) - vram.experts_bytes(spec, stored, rows)
    return {"rows_bytes": counted.peak, "planned_bytes": planned + long_bytes(spec, rows)}


def case(path: str, vram: int, options: dict[str, Any], seed: str, swept: int) -> dict[str, Any]:
    prepared = planned(path, vram, **options)
    plan, spec = prepared.plan, prepared.declared.spec
    stored = stored_types(plan, prepared.checkpoint, prepared.declared)
    folder, key = Path(triton.knobs.cache.dir), key_of(plan, spec, stored, CAPABILITY)
    variants = read_kept(folder, key)
    if variants is None:
        variants = [variant for found in rehearsed(plan, spec, stored, CAPABILITY) for variant in found]
        keep(folder, key, variants)
    with keys_of_compiler() as ours:
        for variant in variants:
            ahead._compile(variant, ahead.TargetDriver(CAPABILITY).get_current_target())
    launched = launch(rehearsal.rehearse(plan, spec, stored, CAPABILITY))
    swept = launch(sweep(prepared, random.Random(seed), swept))
    stage = stage_with_weights(prepared)
    return {
        "counts": Counter(variant.name for variant in variants),
        "gpu_only": plan.gpu is not None and plan.gpu.gpu_only,
        "ours": len(ours),
        "not_launched": len(ours - launched),
        "not_compiled": len(launched - ours),
        "swept": len(swept),
        "not_rehearsed": len(swept - ours),
        "most_rows": plan.max_batch_tokens,
        "running": plan.max_running,
        **rows_in_vram(prepared, stage),
        **pass_in_vram(prepared, stage, from_keywords(EngineOptions, vram=vram, **options)),
    }


def main() -> None:
    asked = msgspec.json.decode(sys.argv[1])
    sys.stdout.write(json.dumps([case(**one) for one in asked]))


if __name__ == "__main__":
    main()
