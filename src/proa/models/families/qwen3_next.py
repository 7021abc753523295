"""Qwen3-Next: three layers of linear attention (gated delta rule) per layer of gated attention; all layers have routed
experts and a gated shared one. Source: modeling_qwen3_next.py in Hugging Face transformers.
"""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, layer_types, model_of
from proa.models.families.moe import qwen_ffns
from proa.models.names import HF_IGNORED, MTP_NOT_LOADED, NameTable
from proa.models.spec import Block, GatedDeltaNet, Mixer, Mlp, Model

NAMES = NameTable(
    (
        ("blocks.{i}.mixer.qkvz.weight", "model.layers.{i}.linear_attn.in_proj_qkvz.weight"),
        ("blocks.{i}.mixer.ba.weight", "model.layers.{i}.linear_attn.in_proj_ba.weight"),
        ("blocks.{i}.mixer.conv.weight", "model.layers.{i}.linear_attn.conv1d.weight"),
        ("blocks.{i}.mixer.a_log", "model.layers.{i}.linear_attn.A_log"),
        ("blocks.{i}.mixer.dt_bias", "model.layers.{i}.linear_attn.dt_bias"),
        ("blocks.{i}.mixer.norm.weight", "model.layers.{i}.linear_attn.norm.weight"),
        ("blocks.{i}.mixer.out.weight", "model.layers.{i}.linear_attn.out_proj.weight"),
    ),
    ignored=(*HF_IGNORED, (r"mtp\..*", MTP_NOT_LOADED)),
)


def qwen3_next(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 32768)
    c.expect("use_sliding_window", False)
    c.ignore("unused without use_sliding_window", "sliding_window", "max_window_layers")
    attends = attention(c, partial=0.25, qk_norm="head", gated=True, **biases(c))
    delta = _delta(c, attends.hidden)
    ffns = qwen_ffns(c, attends.hidden, Mlp(attends.hidden, c.size("shared_expert_intermediate_size")))
    mixers: list[Mixer] = [attends if full else delta for full in _full(c)]
    blocks = [Block(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return model_of(c, attends.rope, blocks, norm_offset=1.0), NAMES


def _delta(c: Reader, hidden: int) -> GatedDeltaNet:
    keys, values = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
    if values % keys:
        raise c.error(f"linear_num_value_heads must be a multiple of linear_num_key_heads {keys}, but it is {values}")
    taps = c.size("linear_conv_kernel_dim", 4)
    if taps < 2:
        raise c.error(f"linear_conv_kernel_dim must be at least 2, but it is {taps}")
    return GatedDeltaNet(hidden, keys, values, c.size("linear_key_head_dim"), c.size("linear_value_head_dim"), taps)


def _full(c: Reader) -> list[bool]:
    """Per layer, True if it has full attention: from `layer_types`, else every full_attention_interval-th layer."""
    layers, interval = c.size("num_hidden_layers"), c.size("full_attention_interval", 4)
    names = {True: "full_attention", False: "linear_attention"}
    kinds = layer_types(c, [names[(i + 1) % interval == 0] for i in range(layers)], *names.values())
    if names[True] not in kinds:
        raise c.error("layer_types has no full_attention layer, and a model without one is not implemented")
    return [kind == names[True] for kind in kinds]


ARCHITECTURES = {"Qwen3NextForCausalLM": qwen3_next}
