"""Numbers that follow from a spec alone."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from proa.models.spec import Attention, Block, GatedDeltaNet, LatentAttention, Mlp, Model, Moe, Rope, Router

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


def test_linear_attention_keeps_as_much_however_long_a_sequence_is() -> None:
    delta = GatedDeltaNet(64, key_heads=2, value_heads=6, key_dim=16, value_dim=32, taps=4)
    spec = Model(64, 100, (Block(delta, MOE), Block(MIXER, MOE)), 1e-6, 512)
    channels = 2 * 2 * 16 + 6 * 32
    assert dict(delta.params()) == {
        "qkvz.weight": (channels + 6 * 32, 64), "ba.weight": (12, 64), "conv.weight": (channels, 1, 4),
        "a_log": (6,), "dt_bias": (6,), "norm.weight": (32,), "out.weight": (64, 6 * 32),
    }  # fmt: skip
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 2 * 16
    assert spec.state_bytes_per_sequence(2) == 4 * 6 * 16 * 32 + 2 * 3 * channels
    assert (spec.recurrent, spec.mixers, spec.ropes) == (True, (delta, MIXER), {Rope(16)})
    assert not model(MOE).recurrent
    assert model(MOE).state_bytes_per_sequence(2) == 0


def test_latent_attention_keeps_one_row_of_all_heads() -> None:
    mixer = LatentAttention(64, 4, 40, 32, 24, 16, Rope(8))
    spec = Model(64, 100, (Block(mixer, MOE), Block(MIXER, MOE)), 1e-6, 512)
    assert dict(mixer.params()) == {
        "q_a.weight": (40, 64), "q_a_norm.weight": (40,), "q_b.weight": (4 * 32, 40), "kv_a.weight": (40, 64),
        "kv_a_norm.weight": (32,), "kv_b.weight": (4 * 40, 32), "o.weight": (64, 64),
    }  # fmt: skip
    assert dict(replace(mixer, q_rank=None).params())["q.weight"] == (4 * 32, 64)
    assert spec.kv_bytes_per_token(2) == 2 * (32 + 8) + 2 * 2 * 2 * 16
    assert (spec.mixers, spec.ropes) == ((mixer, MIXER), {Rope(8), Rope(16)})
    assert not spec.recurrent


def test_a_gate_doubles_the_rows_of_q() -> None:
    assert dict(replace(MIXER, gated=True, qkv_bias=True).params())["q.bias"] == (2 * 64,)


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
