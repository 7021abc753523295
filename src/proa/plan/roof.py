"""The roof, the physical limit of decode: bandwidth over the bytes that one token must read. Pure. Never: measuring."""

from __future__ import annotations

import msgspec

from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.plan.placement import BF16_BYTES
from proa.plan.plan import GpuPlan, Plan, Roof, VramRoof

# Context length whose KV the roof counts.
ROOF_CONTEXT_TOKENS = 256

# Used if the driver does not report bandwidth: no GPU is faster than this (B200), so the roof is still a limit.
FASTEST_VRAM_BYTES_PER_S = 8e12


def cpu_roof(spec: Model, active_bytes: int, elem_bytes: int, kv_elem_bytes: int, bandwidth: float) -> Roof:
    """The roof on a CPU: one request reads all active parameters and its KV once per token."""
    past = past_bytes(spec, ROOF_CONTEXT_TOKENS, elem_bytes, kv_elem_bytes)
    return Roof(bytes_per_token=round(active_bytes + past), bandwidth_bytes_per_s=bandwidth)


def past_bytes(spec: Model, context_tokens: float, elem_bytes: int, kv_elem_bytes: int) -> float:
    """Bytes of past that one decoded token moves: all KV is read, recurrent states are read and written."""
    return context_tokens * spec.kv_bytes_per_token(kv_elem_bytes) + 2 * spec.state_bytes_per_sequence(elem_bytes)


def split_roof(spec: Model, plan: GpuPlan, gpu: Gpu, bandwidth: float, kv_elem_bytes: int) -> Roof:
    """The roof with a GPU: dense weights and KV come from VRAM, then resident experts from VRAM while the others come
    from RAM. Routing counts as uniform.
    """
    in_vram = in_ram = 0.0
    top_k = [ffn.top_k for ffn in spec.routed.values()]
    for chosen, expert_bytes, experts, resident in zip(
        top_k, plan.expert_bytes, plan.experts, plan.resident, strict=True
    ):
        read_bytes = chosen * expert_bytes
        share = len(resident) / experts
        in_vram += read_bytes * share
        in_ram += read_bytes * (1 - share)
    rate, source = _vram_rate(gpu, bandwidth)
    past = past_bytes(spec, ROOF_CONTEXT_TOKENS, BF16_BYTES, kv_elem_bytes)
    vram = VramRoof(
        dense_bytes_per_token=plan.vram.dense_read_bytes + round(past),
        expert_bytes_per_token=round(in_vram),
        bandwidth_bytes_per_s=rate,
        source=source,
        read_ahead=plan.read_ahead or plan.deferred > 0,
    )
    return Roof(bytes_per_token=round(in_ram), bandwidth_bytes_per_s=bandwidth, vram=((vram,),))


def roof_at(plan: Plan, context_tokens: int) -> Roof:
    """The plan's roof at a context of `context_tokens`."""
    more_tokens, held = context_tokens - ROOF_CONTEXT_TOKENS, plan.num_pages * plan.page_tokens
    roof, gpus = plan.roof, iter(plan.gpus)
    if not roof.vram:
        more_bytes = more_tokens * (plan.memory.kv_bytes // held)
        return msgspec.structs.replace(roof, bytes_per_token=roof.bytes_per_token + more_bytes)

    def longer(of: VramRoof, gpu: GpuPlan) -> VramRoof:
        more_bytes = more_tokens * (gpu.vram.kv_bytes // held)
        return msgspec.structs.replace(of, dense_bytes_per_token=of.dense_bytes_per_token + more_bytes)

    vram = tuple(tuple(longer(of, next(gpus)) for of in stage) for stage in roof.vram)
    return msgspec.structs.replace(roof, vram=vram)


def _vram_rate(gpu: Gpu, ram_rate: float) -> tuple[float, str]:
    if gpu.simulated:
        return ram_rate, "RAM's: the GPU is simulated in RAM"
    if gpu.memory_bytes_per_s is None:
        return FASTEST_VRAM_BYTES_PER_S, "not reported by the driver: the fastest GPU's"
    return gpu.memory_bytes_per_s, "by its data sheet"
