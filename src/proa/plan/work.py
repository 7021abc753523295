"""What a step of a planned model reads and computes, by where its experts are. Pure. Never: rates, decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from proa.config.options import ModelOptions
from proa.models.names import Declared
from proa.models.spec import Block, Model
from proa.plan.budget import ELEM_BYTES, KV_ELEM_BYTES
from proa.plan.placement import MoeLayer, moe_layers
from proa.plan.plan import Plan
from proa.plan.roof import ROOF_CONTEXT_TOKENS, past_bytes
from proa.plan.stored import kept_types
from proa.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class MoeWork:
    """The routed experts of one layer. expert_bytes: packed, of one; expert_flops: of one row of one expert; resident:
    number in VRAM. Every expert is equally likely."""

    experts: int
    top_k: int
    expert_bytes: int
    expert_flops: int
    resident: int = 0

    @property
    def in_ram(self) -> int:
        return self.experts - self.resident

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of an expert, including its share of the scales."""
        return 2 * self.expert_bytes / self.expert_flops

    def distinct(self, rows: int) -> float:
        """Expected number of different experts that so many rows choose."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    def ram_bytes(self, rows: int) -> float:
        return self.distinct(rows) * self.expert_bytes * self.in_ram / self.experts

    def vram_bytes(self, rows: int) -> float:
        return self.distinct(rows) * self.expert_bytes * self.resident / self.experts

    def ram_flops(self, rows: int) -> float:
        return rows * self.top_k * self.expert_flops * self.in_ram / self.experts

    def vram_flops(self, rows: int) -> float:
        return rows * self.top_k * self.expert_flops * self.resident / self.experts


@dataclass(frozen=True)
class Work:
    """The parts of a step. dense_bytes: weights that every step reads, without routed experts and head. block_flops: of
    one row with the matrices of each block. head_bytes: of the head, which a prompt needs once. experts: by block, of
    those that have routed ones."""

    spec: Model
    dense_bytes: int
    block_flops: tuple[int, ...]
    head_bytes: int
    experts: Mapping[int, MoeWork]

    @cached_property
    def moe(self) -> Mapping[MoeWork, int]:
        """Layers of equal work, counted."""
        return Counter(self.experts.values())


def planned_work(plan: Plan, asked: ModelOptions, declared: Declared, checkpoint: Checkpoint) -> Work:
    """The work of a plan of this model. Raises what `kept_types` raises."""
    return work_of(plan, declared.spec, kept_types(asked, declared, checkpoint) if plan.isa else {})


def work_of(plan: Plan, spec: Model, stored: Mapping[str, str]) -> Work:
    """The work of a plan. stored: of kept_types."""
    layers = moe_layers(spec, stored) if plan.gpu is not None or stored else _plain(spec, ELEM_BYTES[plan.dtype])
    resident = [0] * len(layers) if plan.gpu is None else [len(ids) for ids in plan.gpu.resident]
    experts = {
        layer.block: MoeWork(layer.experts, layer.top_k, layer.expert_bytes, 2 * _matrices(spec, layer), count)
        for layer, count in zip(layers, resident, strict=True)
    }
    read_bytes = _dense_bytes(plan, spec, layers) if plan.gpu is None else plan.gpu.vram.dense_read_bytes
    head_bytes = min(read_bytes, spec.vocab * spec.hidden * ELEM_BYTES[plan.dtype])
    return Work(spec, read_bytes - head_bytes, tuple(map(_block_flops, spec.blocks)), head_bytes, experts)


def _block_flops(block: Block) -> int:
    """Operations of one row in the matrices of the block, routed experts left out."""
    return 2 * sum(prod(shape) for _, shape in block.params(routed=False) if len(shape) == 2)


def _dense_bytes(plan: Plan, spec: Model, layers: Sequence[MoeLayer]) -> int:
    """Dense weights that a decoded token reads on the CPU: the roof's bytes without the chosen experts and the past."""
    elem_bytes, kv_elem_bytes = ELEM_BYTES[plan.dtype], KV_ELEM_BYTES[plan.kv_dtype]
    past = past_bytes(spec, ROOF_CONTEXT_TOKENS, elem_bytes, kv_elem_bytes)
    return plan.roof.bytes_per_token - round(past) - sum(layer.top_k * layer.expert_bytes for layer in layers)


def _plain(spec: Model, elem_bytes: int) -> list[MoeLayer]:
    """The layers of a model whose roof counts unpacked weights."""
    return [
        MoeLayer(i, ffn.experts, ffn.top_k, elem_bytes * sum(prod(shape) for _, shape in ffn.expert.params()))
        for i, ffn in spec.routed.items()
    ]


def _matrices(spec: Model, layer: MoeLayer) -> int:
    """Parameters of one expert's matrices."""
    return sum(prod(shape) for _, shape in spec.routed[layer.block].expert.params() if len(shape) == 2)
