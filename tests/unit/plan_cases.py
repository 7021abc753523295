"""Checkpoints by their headers alone, and rows of the start-up table. Never: tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from proa.models.spec import Attention, Block, GatedDeltaNet, Mlp, Model, Moe, Rope, RopeScaling, Router
from proa.plan.plan import Plan
from proa.weights.index import TensorInfo

GIB = 1 << 30


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int, scaling: RopeScaling | None = None) -> Attention:
    return Attention(hidden, heads, kv_heads, head_dim, Rope(head_dim, scaling=scaling))


def moe(hidden: int, experts: int, top_k: int, width: int, shared: int = 0) -> Moe:
    return Moe(
        hidden, experts, top_k, width, Router("softmax", True), Mlp(hidden, shared) if shared else None, bool(shared)
    )


def model(vocab: int, layers: int, block: Block, positions: int, tied: bool = False) -> Model:
    return Model(block.mixer.hidden, vocab, (block,) * layers, 1e-6, positions, tied)


# The demo: SmolLM2-135M split into 16 experts of which 12 run. Facts of the others from their config.json.
DEMO = model(49152, 30, Block(attention(576, 9, 3, 64), moe(576, 16, 12, 48, 768)), 8192, tied=True)


QWEN3_30B = model(151936, 48, Block(attention(2048, 32, 4, 128), moe(2048, 128, 8, 768)), 40960)


GATED = replace(attention(2048, 16, 2, 256), qk_norm="head", gated=True)


DELTA = GatedDeltaNet(2048, 16, 32, 128, 128, 4)


NEXT_BLOCKS = tuple(Block(GATED if i % 4 == 3 else DELTA, moe(2048, 512, 10, 512, 512)) for i in range(48))


NEXT = Model(2048, 151936, NEXT_BLOCKS, 1e-6, 262144, norm_offset=1.0)


@dataclass(frozen=True)
class FakeCheckpoint:
    path: Path = Path("/models/m")
    load_format: str = "safetensors"
    dtype: str = "bfloat16"
    quantisation: None = None
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)


def row(of: Plan, name: str) -> tuple[str, str, str]:
    found = next(d for d in of.decisions if d.name == name)
    return found.asked, found.got, found.why
