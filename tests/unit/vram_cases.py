"""Models, GPUs and machines that plans of VRAM are tested with. Never: tests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions, SchedulerOptions
from proa.machine.machine import Gpu, Machine
from proa.models.spec import (
    Attention,
    Block,
    Gating,
    Mlp,
    Model,
    Moe,
    Rope,
    Router,
)
from proa.plan.expert_counts import Counts
from proa.plan.placement import moe_layers
from proa.plan.plan import GpuPlan, Plan
from proa.plan.resolve import Host, resolve
from proa.plan.vram import (
    dense_bytes,
)
from quick_plan import ram_of

GIB = 1 << 30


RAM_RATE, VRAM_RATE = 100e9, 4e12


GROUPS = {
    "model": ModelOptions, "cache": CacheOptions, "scheduler": SchedulerOptions, "machine": MachineOptions,
    "gpus": GpuOptions,
}  # fmt: skip


def model(vocab: int, layers: int, block: Block, positions: int, tied: bool = False) -> Model:
    return Model(block.mixer.hidden, vocab, (block,) * layers, 1e-6, positions, tied)


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Attention:
    return Attention(hidden, heads, kv_heads, head_dim, Rope(head_dim))


def moe(hidden: int, experts: int, top_k: int, width: int, shared: int = 0) -> Moe:
    router = Router("softmax", True)
    return Moe(hidden, experts, top_k, width, router, Mlp(hidden, shared) if shared else None, bool(shared))


QWEN3_30B = model(151936, 48, Block(attention(2048, 32, 4, 128), moe(2048, 128, 8, 768)), 40960)


MIXTRAL = model(32000, 32, Block(attention(4096, 32, 8, 128), moe(4096, 8, 2, 14336)), 32768)


DEMO = model(49152, 30, Block(attention(576, 9, 3, 64), moe(576, 16, 12, 48, 768)), 8192, tied=True)


DENSE = model(32000, 16, Block(attention(2048, 32, 8, 64), Mlp(2048, 8192)), 4096)


CLAMPED = Gating("clamped_swiglu", 7.0)


GPT_OSS_MOE = Moe(2880, 128, 4, 2880, Router("softmax", True, linear_bias=True), bias=True, gating=CLAMPED)


SUNK = replace(attention(2880, 64, 8, 64), qkv_bias=True, o_bias=True, sinks=True)


GPT_OSS = model(201088, 36, Block(SUNK, GPT_OSS_MOE), 131072)


# Like DeepSeek: the first block is dense.
MIXED = replace(DEMO, blocks=(Block(DEMO.blocks[0].mixer, Mlp(576, 1536)), *DEMO.blocks[1:]))


def gpu(total_gib: float, **facts: Any) -> Gpu:
    settled = {"capability": (9, 0), "memory_bytes_per_s": VRAM_RATE, "uuid": "GPU-1", "numa_node": 0, **facts}
    return Gpu(index=0, name="Test GPU", total_bytes=int(total_gib * GIB), free_bytes=int(total_gib * GIB), **settled)


def machine(ram_gib: float, *gpus: Gpu) -> Machine:
    return Machine(
        cpu="Test CPU", online_cpus=8, usable_cpus=tuple(range(8)), total_bytes=int(ram_gib * GIB),
        available_bytes=int(ram_gib * GIB), gpus=gpus, torch_cuda="12.8",
    )  # fmt: skip


def plan(
    spec: Model, box: Machine, *, load_format: str = "safetensors", experts_used: Counts = (), **asked: Any
) -> Plan:
    groups = {
        name: group(**{key: asked.pop(key) for key in list(asked) if key in group.__dataclass_fields__})
        for name, group in GROUPS.items()
    }
    assert not asked
    checkpoint = SimpleNamespace(path="/models/m", load_format=load_format, dtype="bfloat16", quantisation=None)
    isa = "" if load_format == "gguf" else "avx512-bf16"  # packed sizes of GGUF need a checkpoint's headers
    named, host = SimpleNamespace(spec=spec), Host(box, ram_of(RAM_RATE), isa, "")
    return resolve(EngineOptions(**groups), "some/model", checkpoint, named, host, experts_used)


def row(of: Plan, name: str) -> tuple[str, str, str]:
    found = next(d for d in of.decisions if d.name == name)
    return found.asked, found.got, found.why


def counts(of: Plan) -> list[int]:
    assert of.gpu is not None
    return [len(ids) for ids in of.gpu.resident]


def check(of: Plan, spec: Model) -> GpuPlan:
    """Check the invariants of a plan with a GPU."""
    got, layers = of.gpu, moe_layers(spec, {})
    assert got is not None
    vram, memory = got.vram, of.memory
    assert vram.used_bytes <= vram.usable_bytes
    assert vram.dense_bytes == dense_bytes(spec, {})
    assert vram.kv_bytes == of.num_pages * of.page_tokens * spec.kv_bytes_per_token(2)
    assert 0 < of.context_tokens <= min(spec.max_positions, of.num_pages * of.page_tokens)
    assert got.blocks == tuple(layer.block for layer in layers)
    assert got.expert_bytes == tuple(layer.expert_bytes for layer in layers)
    assert vram.experts_bytes == sum(n * layer.expert_bytes for n, layer in zip(counts(of), layers, strict=True))
    total = sum(layer.total_bytes for layer in layers)
    again = sum(
        0 if got.inclusive or not n else (layer.experts - n) * layer.bias_bytes
        for n, layer in zip(counts(of), layers, strict=True)
    )
    biases = sum(layer.experts * layer.bias_bytes for layer in layers) + again
    assert memory.weights_bytes == biases + (total if got.inclusive else total - vram.experts_bytes)
    assert memory.kv_bytes == 0
    parts = (memory.process_bytes, memory.weights_bytes, memory.loading_bytes, memory.workspace_bytes)
    assert sum(parts) + memory.simulated_vram_bytes <= memory.usable_bytes
    assert memory.simulated_vram_bytes == (vram.used_bytes if got.simulated else 0)
    assert not (got.gpu_only and got.inclusive)
    assert vram.spare_bytes == got.spare * sum(set(got.expert_bytes))
    assert (got.placement == "dynamic") == (got.spare > 0)
    assert not got.spare or any(0 < n < layer.experts for n, layer in zip(counts(of), layers, strict=True))
    assert of.roof.tokens_per_s > 0
    return got
