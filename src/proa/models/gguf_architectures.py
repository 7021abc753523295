"""GGUF architectures: what their metadata and tensors say, in the words of Hugging Face's configs. Belongs here: one
reader for each. Never: keys that all of them share (gguf.py), file access, torch.

Sources: the conversion and the graph of each architecture in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proa.models.config_reader import Reader

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[Reader, Shapes], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """read: the keys of its own. in_part: of each head some dimensions may not turn. yarn: what its models have with
    this scaling and no key says."""

    read: Read
    in_part: bool = False
    yarn: Mapping[str, Any] = field(default_factory=dict)


def shape_of(c: Reader, shapes: Shapes, tensor: str) -> tuple[int, ...]:
    """Raises ConfigError where the tensor is missing."""
    if tensor not in shapes:
        raise c.error(f"the tensor {tensor} is missing")
    return shapes[tensor]


def _has(tensor: str) -> Callable[[Shapes], bool]:
    """Of the first layer."""
    return lambda shapes: f"blk.0.{tensor}" in shapes


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


def _dense(architecture: str) -> Callable[[Reader, Shapes], dict[str, Any]]:
    return lambda c, shapes: {"architectures": [architecture]}


def _qwen_moe(architecture: str, renormalise: bool, bias_key: str) -> Callable[[Reader, Shapes], dict[str, Any]]:
    """`renormalise`: what the architecture does when the file does not say it. `bias_key`: of biases of q, k and v."""

    def read(c: Reader, shapes: Shapes) -> dict[str, Any]:
        c.expect("expert_gating_func", 1)  # softmax
        c.expect("expert_weights_scale", 0.0, 1.0)
        c.ignore("the tensors' shapes say it", "expert_feed_forward_length", "expert_shared_feed_forward_length")
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

    return read


def _v3_moe(architecture: str, **more: Callable[[Shapes], bool]) -> Callable[[Reader, Shapes], dict[str, Any]]:
    """Experts with sigmoid scores and a correction behind dense layers. `more`: keys that the tensors say."""

    def read(c: Reader, shapes: Shapes) -> dict[str, Any]:
        c.expect("expert_gating_func", 2)  # sigmoid
        guesses = c.get("nextn_predict_layers", int, 0)
        return {
            "architectures": [architecture],
            "num_hidden_layers": c.size("block_count") - guesses,
            "num_nextn_predict_layers": guesses,
            "n_routed_experts": c.size("expert_count"),
            "num_experts_per_tok": c.size("expert_used_count"),
            "n_shared_experts": c.get("expert_shared_count", int, 0),
            "moe_intermediate_size": c.size("expert_feed_forward_length"),
            "first_k_dense_replace": c.get("leading_dense_block_count", int, 0),
            "n_group": c.size("expert_group_count", None),
            "topk_group": c.size("expert_group_used_count", None),
            "norm_topk_prob": c.get("expert_weights_norm", bool),
            "routed_scaling_factor": c.get("expert_weights_scale", float, 0.0) or 1.0,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            **{key: says(shapes) for key, says in more.items()},
        }

    return read


def _minimax_m2(c: Reader, shapes: Shapes) -> dict[str, Any]:
    c.expect("expert_gating_func", 2)  # sigmoid
    c.expect("expert_weights_norm", True)
    c.expect("expert_weights_scale", 0.0, 1.0)
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "intermediate_size": c.size("expert_feed_forward_length"),
    }


def _gpt_oss(c: Reader, shapes: Shapes) -> dict[str, Any]:
    """Every other layer is in the window, the first one too."""
    c.expect("attention.sliding_window_pattern", 2)
    c.expect("expert_weights_scale", 0.0, 1.0)
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": c.size("expert_count"),
        "num_experts_per_tok": c.size("expert_used_count"),
        "intermediate_size": c.size("expert_feed_forward_length"),
        "sliding_window": c.size("attention.sliding_window"),
    }


def _ernie_moe(c: Reader, shapes: Shapes) -> dict[str, Any]:
    c.expect("expert_gating_func", 1)  # softmax
    c.expect("expert_weights_norm", True)
    c.expect("expert_weights_scale", 0.0, 1.0)
    c.ignore("the tensors' shapes say it", "expert_shared_feed_forward_length")
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


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama),
    "qwen2": Architecture(_dense("Qwen2ForCausalLM")),
    "qwen3": Architecture(_dense("Qwen3ForCausalLM")),
    "qwen2moe": Architecture(_qwen_moe("Qwen2MoeForCausalLM", renormalise=False, bias_key="qkv_bias")),
    "qwen3moe": Architecture(_qwen_moe("Qwen3MoeForCausalLM", renormalise=True, bias_key="attention_bias")),
    "glm4moe": Architecture(_v3_moe("Glm4MoeForCausalLM", use_qk_norm=_has("attn_q_norm.weight")), in_part=True),
    "dots1": Architecture(_v3_moe("Dots1ForCausalLM")),
    "minimax-m2": Architecture(_minimax_m2, in_part=True),
    "gpt-oss": Architecture(_gpt_oss, yarn={"truncate": False}),
    "ernie4_5-moe": Architecture(_ernie_moe),
}
