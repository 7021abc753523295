"""The plan of a path: the engine's own for the path's options, and what no option asks for. Pure. Never: building it.

Files and RAM of the prefix cache are asked for as a user does. Which instruction set, how many experts are copied for a
prompt, in how many groups, and how many are read in place are facts of a machine that a path must have whatever the
machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from proa.check.drive import FROM_FILES, FROM_RAM
from proa.check.paths import NoPath, Path, Streams
from proa.config.options import EngineOptions
from proa.errors import ResourceError, UsageError
from proa.models.ranks import CPU
from proa.models.spec import Model
from proa.ops.sizes import RING_BANKS, aligned, bank_bytes, ring_groups
from proa.plan.plan import GpuPlan, Plan

_TIER_TOKENS = 2048  # that a tier has room for: more than all prompts have
_TIER_COPIES = 24  # of recurrent states, likewise: each prompt has up to four
_WIDEST_BYTES = 4  # of an element of KV and of states


@dataclass(frozen=True)
class Adapted:
    """plan: with which the path is run. left_out: of it, phases that cannot be checked, and why."""

    plan: Plan
    left_out: dict[str, str] = field(default_factory=dict)


def adapt(path: Path, spec: Model, folder: str, make: Callable[[EngineOptions], Plan]) -> Adapted | NoPath:
    """Make the plan. folder: for files of the prefix cache. make: raises ResourceError, UsageError if there is no plan
    for these options."""
    left_out: dict[str, str] = {}
    if path.tiers:
        try:
            plan = make(_with_tiers(path.options, spec, folder))
            return _run_as(path, plan, _missing_tiers(plan))
        except (ResourceError, UsageError) as error:
            left_out = dict.fromkeys((FROM_RAM, FROM_FILES), error.message)
    try:
        return _run_as(path, make(path.options), left_out)
    except (ResourceError, UsageError) as error:
        return NoPath(path.name, error.message)


def _with_tiers(options: EngineOptions, spec: Model, folder: str) -> EngineOptions:
    nbytes = (1 << 20) + _TIER_TOKENS * spec.kv_bytes_per_token(_WIDEST_BYTES)
    nbytes += _TIER_COPIES * spec.state_bytes_per_sequence(_WIDEST_BYTES)
    cache = replace(options.cache, prefix_cache_ram=nbytes, prefix_cache_dir=folder, prefix_cache_disk=nbytes)
    return replace(options, cache=cache)


def _missing_tiers(plan: Plan) -> dict[str, str]:
    rows = {decision.name: decision.why for decision in plan.decisions}
    missing = {}
    if not plan.memory.prefix_cache_bytes:
        missing[FROM_RAM] = rows.get("prefix cache in RAM", "it is not planned")
    if plan.prefix_files is None:
        missing[FROM_FILES] = rows.get("prefix cache files", "they are not planned")
    return missing


def _run_as(path: Path, plan: Plan, left_out: dict[str, str]) -> Adapted | NoPath:
    if path.isa:
        plan = msgspec.structs.replace(plan, isa=path.isa)
    if plan.workers is None:
        plan = msgspec.structs.replace(plan, threads=1)  # a forked process must not start torch's threads
    if path.moving and (plan.gpu is None or not plan.gpu.spare):
        return NoPath(path.name, "the plan leaves no room in VRAM for experts that move")
    if path.in_place:
        if plan.gpu is None or not plan.gpu.co_fetch:
            why = "the CPU computes no experts that the GPU could read"
            return NoPath(path.name, next((row.why for row in plan.decisions if row.name == "co-fetch"), why))
        plan = msgspec.structs.replace(plan, gpus=(msgspec.structs.replace(plan.gpu, co_fetch_half=True),))
    if path.streams is not Streams.NOTHING:
        if plan.gpu is None or not plan.gpu.ring_bytes:
            return NoPath(path.name, next((row.why for row in plan.decisions if row.name == "prefill"), "no ring"))
        gpu = _with_ring(path, plan.gpu)
        if isinstance(gpu, str):
            return NoPath(path.name, gpu)
        plan = msgspec.structs.replace(plan, gpus=(gpu,))
    if plan.gpu is not None:  # notes are copies of one step, graphs would write to those of another
        plan = msgspec.structs.replace(plan, gpus=(msgspec.structs.replace(plan.gpu, block_graphs=False),))
    return Adapted(plan, left_out)


def _with_ring(path: Path, gpu: GpuPlan) -> GpuPlan | str:
    """The plan with a ring that holds a layer's streamed experts as the path says; else why there is none."""
    in_ram = [owners.count(CPU) for owners in gpu.owners]
    streamed = [(count + 1) // 2 if path.halved else count for count in in_ram]
    layers = list(zip(streamed, gpu.expert_bytes, strict=True))
    if path.halved and streamed == in_ram:
        return "no layer has two experts in RAM, one to be streamed and one for the CPU"
    nbytes = bank_bytes(gpu.ring_bytes)
    if path.streams is Streams.GROUPS and _groups(layers, nbytes) == 1:
        nbytes = aligned(max(max(1, (count + 1) // 2) * expert_bytes for count, expert_bytes in layers))
    groups = _groups(layers, nbytes)
    if path.streams is Streams.WHOLE and groups > 1:
        return f"the ring, as VRAM allows, holds a layer's streamed experts in {groups} groups, not at once"
    if path.streams is Streams.GROUPS and groups == 1:
        return "too few experts are streamed in a layer to be divided into groups"
    prefill = "half" if path.halved else gpu.prefill
    return msgspec.structs.replace(gpu, ring_bytes=RING_BANKS * nbytes, prefill=prefill)


def _groups(layers: list[tuple[int, int]], bank_bytes: int) -> int:
    """The most groups of a layer. layers: of each the number of streamed experts, and the bytes of one."""
    return max(ring_groups(count, nbytes, bank_bytes) for count, nbytes in layers)
