"""Numbers that follow from a spec alone."""

from __future__ import annotations

from math import prod

from proa.models.spec import Attention, Block, Mlp, Model, Moe, Rope, Router

MIXER = Attention(64, 4, 2, 16, Rope(16))
MOE = Moe(64, 8, 2, 24, Router("softmax", True), shared=Mlp(64, 40), shared_gate=True)


def model(*ffns: Mlp | Moe, tied: bool = False) -> Model:
    return Model(64, 100, tuple(Block(MIXER, ffn) for ffn in ffns), 1e-6, 512, tied)


def test_parameters() -> None:
    params = dict(model(MOE, Mlp(64, 96)).params())
    assert params["blocks.0.mixer.k.weight"] == (32, 64)
    assert params["blocks.0.ffn.experts.7.down.weight"] == (64, 24)
    assert params["blocks.0.ffn.shared.up.weight"] == (40, 64)
    assert params["blocks.0.ffn.shared_gate.weight"] == (1, 64)
    assert params["blocks.1.ffn.gate.weight"] == (96, 64)
    assert params["head.weight"] == params["embed.weight"] == (100, 64)
    assert "head.weight" not in dict(model(MOE, tied=True).params())


def test_counts() -> None:
    spec = model(MOE, Mlp(64, 96))
    assert spec.num_params == sum(prod(shape) for _, shape in spec.params())
    assert spec.kv_bytes_per_token(2) == 2 * 2 * (2 * 2 * 16)
    idle_experts = 6 * 3 * 64 * 24
    assert spec.num_active_params == spec.num_params - idle_experts - 100 * 64
    assert model(MOE, tied=True).num_active_params == model(MOE, tied=True).num_params - idle_experts
    block = [prod(shape) for name, shape in spec.params() if name.startswith("blocks.0.")]
    assert spec.largest_block_params == sum(block)


def test_optional_parts() -> None:
    mixer = Attention(64, 4, 2, 16, Rope(16), qk_norm="head", qkv_bias=True, o_bias=True)
    names = {name: shape for name, shape in mixer.params() if "bias" in name or "norm" in name}
    assert names == {
        "q.bias": (64,),
        "k.bias": (32,),
        "v.bias": (32,),
        "o.bias": (64,),
        "q_norm.weight": (16,),
        "k_norm.weight": (16,),
    }
    assert dict(Mlp(64, 96, bias=True).params())["down.bias"] == (64,)
