"""GGUF architectures: translate each one's metadata and tensor shapes to the keys of Hugging Face's configs. Belongs
here: one reader for each. Never: keys that all of them share (gguf.py), file access, torch.

Sources: the converter and the graph of each architecture in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from proa.models.config_reader import Reader
from proa.models.names import Rules

Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, outermost dimension first
Read = Callable[[Reader, Shapes], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """The readers of one architecture. read: its own keys. partial_rotary: the rotary embedding may cover only a part
    of each head. latent: latent attention, whose sizes `read` reads. yarn: reads further parameters of YaRN scaling."""

    read: Read
    partial_rotary: bool = False
    latent: bool = False
    yarn: Callable[[Reader], dict[str, Any]] = lambda c: {}


def shape_of(c: Reader, shapes: Shapes, tensor: str) -> tuple[int, ...]:
    """The shape of a tensor. Raises ConfigError if the file lacks it."""
    if tensor not in shapes:
        raise c.error(f"the tensor {tensor} is missing")
    return shapes[tensor]


def _llama(c: Reader, shapes: Shapes) -> dict[str, Any]:
    """Llama's and Mixtral's q and k rows are stored for interleaved rotary pairs; other architectures' are not."""
    if experts := c.get("expert_count", int, 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "rope_interleaved": True,
            "num_local_experts": experts,
            "num_experts_per_tok": c.size("expert_used_count"),
            "sliding_window": c.size("attention.sliding_window", None),
        }
    c.expect("expert_used_count", 0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "rope_interleaved": True,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }


def _dense(architecture: str, c: Reader, shapes: Shapes) -> dict[str, Any]:
    return {"architectures": [architecture]}


def _qwen_moe(architecture: str, renormalise: bool, bias_key: str, c: Reader, shapes: Shapes) -> dict[str, Any]:
    """Qwen's MoE models. renormalise: the default of norm_topk_prob. bias_key: the config's key for biases of q, k and
    v."""
    c.expect("expert_gating_func", 1)  # softmax
    c.expect("expert_weights_scale", 0.0, 1.0)
    c.ignore("read from tensor shapes", "expert_feed_forward_length", "expert_shared_feed_forward_length")
    layers = range(c.size("block_count"))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
    sparse = next((i for i in layers if i not in dense), 0)
    config = {
        "architectures": [architecture],
        "num_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "norm_topk_prob": c.get("expert_weights_norm", bool, renormalise),
        "mlp_only_layers": dense,
        "moe_intermediate_size": shape_of(c, shapes, f"blk.{sparse}.ffn_down_exps.weight")[-1],
        bias_key: "blk.0.attn_q.bias" in shapes,
    }
    if f"blk.{sparse}.ffn_down_shexp.weight" in shapes:
        config["shared_expert_intermediate_size"] = shapes[f"blk.{sparse}.ffn_down_shexp.weight"][-1]
    return config


def _deepseek_ffns(c: Reader) -> dict[str, Any]:
    """The keys of DeepSeek's experts behind leading dense layers, and of MTP layers, which block_count includes."""
    mtp_layers = c.get("nextn_predict_layers", int, 0)
    return {
        "num_hidden_layers": c.size("block_count") - mtp_layers,
        "num_nextn_predict_layers": mtp_layers,
        "n_routed_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "n_shared_experts": c.get("expert_shared_count", int, 0),
        "moe_intermediate_size": c.size("expert_feed_forward_length"),
        "first_k_dense_replace": c.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": c.get("expert_weights_scale", float, 0.0) or 1.0,
    }


def _v3_moe(architecture: str, c: Reader, shapes: Shapes) -> dict[str, Any]:
    """Llama's attention with DeepSeek-V3's experts: sigmoid scores with a correction."""
    c.expect("expert_gating_func", 2)  # sigmoid
    return {
        "architectures": [architecture],
        **_deepseek_ffns(c),
        "n_group": c.size("expert_group_count", None),
        "topk_group": c.size("expert_group_used_count", None),
        "norm_topk_prob": c.get("expert_weights_norm", bool),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _glm4_moe(c: Reader, shapes: Shapes) -> dict[str, Any]:
    return _v3_moe("Glm4MoeForCausalLM", c, shapes) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}


def _local_experts(c: Reader) -> dict[str, Any]:
    """The keys of a config.json without dense layers, where intermediate_size is the experts' width."""
    return {
        "num_local_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "intermediate_size": c.size("expert_feed_forward_length"),
    }


def _minimax_m2(c: Reader, shapes: Shapes) -> dict[str, Any]:
    c.expect("expert_gating_func", 2)  # sigmoid
    c.expect("expert_weights_norm", True)
    c.expect("expert_weights_scale", 0.0, 1.0)
    return {"architectures": ["MiniMaxM2ForCausalLM"], **_local_experts(c)}


def _gpt_oss(c: Reader, shapes: Shapes) -> dict[str, Any]:
    """gpt-oss: even layers (0, 2, ...) have a sliding window, odd layers full attention."""
    c.expect("attention.sliding_window_pattern", 2)
    c.expect("expert_weights_scale", 0.0, 1.0)
    return {
        "architectures": ["GptOssForCausalLM"],
        **_local_experts(c),
        "sliding_window": c.size("attention.sliding_window"),
    }


def _ernie_moe(c: Reader, shapes: Shapes) -> dict[str, Any]:
    c.expect("expert_gating_func", 1)  # softmax
    c.expect("expert_weights_norm", True)
    c.expect("expert_weights_scale", 0.0, 1.0)
    c.ignore("read from tensor shapes", "expert_shared_feed_forward_length")
    layers = range(c.size("block_count"))
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in shapes]
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "num_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "moe_intermediate_size": c.size("expert_feed_forward_length"),
        "moe_num_shared_experts": c.get("expert_shared_count", int, 0),
        "moe_layer_start_index": c.get("leading_dense_block_count", int, 0),
        "moe_layer_end_index": max(sparse, default=0),
        "moe_layer_interval": c.size("interleave_moe_layer_step", 1),
    }


# Number of experts -> (n_group, topk_group) of DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3 and Kimi-K2, for older files
# that have no keys for them.
_GROUPS = {64: (1, 1), 160: (8, 3), 256: (8, 4), 384: (1, 1)}


def _deepseek2(c: Reader, shapes: Shapes) -> dict[str, Any]:
    """DeepSeek-V3 if expert_gating_func is sigmoid, else DeepSeek-V2, whose older files lack that key."""
    c.expect("expert_gating_func", 1, 2)
    sigmoid = c.get("expert_gating_func", int, 1) == 2
    experts = c.size("expert_count")
    if not c.has("expert_group_count") and experts not in _GROUPS:
        raise c.error(f"expert_group_count is missing, and no published model has {experts} experts")
    groups, kept = _GROUPS.get(experts, (1, 1))
    groups, kept = c.size("expert_group_count", groups), c.size("expert_group_used_count", kept)
    limited = {} if sigmoid else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        **_deepseek_ffns(c),
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": c.get("expert_weights_norm", bool, False),
        **limited,
        **_latent_heads(c),
    }


def _latent_heads(c: Reader) -> dict[str, Any]:
    """Sizes of latent attention. Files with key_length_mla give the heads' sizes there, and the latent cache's sizes in
    key_length and value_length; files without it give the heads' sizes in key_length and value_length."""
    heads = c.size("attention.head_count")
    rank, rotary_dim = c.size("attention.kv_lora_rank"), c.size("rope.dimension_count")
    c.expect("attention.head_count_kv", 1, heads)
    own = ""
    if c.has("attention.key_length_mla"):
        own = "_mla"
        c.expect("attention.key_length", rank + rotary_dim)
        c.expect("attention.value_length", rank)
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": c.size("attention.q_lora_rank", None),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": c.size(f"attention.key_length{own}") - rotary_dim,
        "v_head_dim": c.size(f"attention.value_length{own}"),
    }


def _deepseek_yarn(c: Reader) -> dict[str, Any]:
    """mscale_all_dim from yarn_log_multiplier, which is a tenth of it. mscale equals it in all published models, as
    llama.cpp assumes too."""
    tenth = c.get("rope.scaling.yarn_log_multiplier", float, None)
    scale = None if tenth is None else round(tenth * 10, 6)
    return {"mscale": scale, "mscale_all_dim": scale}


def _qwen3_next(c: Reader, shapes: Shapes) -> dict[str, Any]:
    layers, interval = c.size("block_count"), c.size("full_attention_interval", 4)
    value_heads, values = c.size("ssm.time_step_rank"), c.size("ssm.inner_size")
    if values % value_heads:
        raise c.error(f"ssm.inner_size is {values}, but it must be a multiple of the {value_heads} value heads")
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return _qwen_moe("Qwen3NextForCausalLM", True, "attention_bias", c, shapes) | {
        "layer_types": kinds,
        "linear_num_key_heads": c.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": c.size("ssm.state_size"),
        "linear_value_head_dim": values // value_heads,
        "linear_conv_kernel_dim": c.size("ssm.conv_kernel"),
    }


# Tensors whose values llama.cpp's converter transforms: architecture -> NameTable.changed.
CHANGED: Mapping[str, Rules] = {
    "Qwen3NextForCausalLM": (
        (r"(blk\.\d+\.(attn|post_attention|attn_q|attn_k)|output)_norm\.weight", "x + 1"),
        (r"blk\.\d+\.ssm_a", "-exp(x)"),
    ),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama),
    "qwen2": Architecture(partial(_dense, "Qwen2ForCausalLM")),
    "qwen3": Architecture(partial(_dense, "Qwen3ForCausalLM")),
    "qwen2moe": Architecture(partial(_qwen_moe, "Qwen2MoeForCausalLM", False, "qkv_bias")),
    "qwen3moe": Architecture(partial(_qwen_moe, "Qwen3MoeForCausalLM", True, "attention_bias")),
    "glm4moe": Architecture(_glm4_moe, partial_rotary=True),
    "dots1": Architecture(partial(_v3_moe, "Dots1ForCausalLM")),
    "minimax-m2": Architecture(_minimax_m2, partial_rotary=True),
    "gpt-oss": Architecture(_gpt_oss, yarn=lambda c: {"truncate": False}),  # openai/gpt-oss config.json
    "deepseek2": Architecture(_deepseek2, latent=True, yarn=_deepseek_yarn),
    "qwen3next": Architecture(_qwen3_next, partial_rotary=True),
    "ernie4_5-moe": Architecture(_ernie_moe),
}
