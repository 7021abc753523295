"""GGUF metadata -> a Hugging Face style config, and the names of GGUF tensors. Never: file access, torch.

Sources: the GGUF specification and the key and tensor names of the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader
from proa.models.names import NameTable, guessing_layers

Shapes = Mapping[str, tuple[int, ...]]

GGUF_NAMES = NameTable(
    defaults=(
        ("embed.weight", "token_embd.weight"),
        ("norm.weight", "output_norm.weight"),
        ("head.weight", "output.weight"),
        ("blocks.{i}.norm1.weight", "blk.{i}.attn_norm.weight"),
        ("blocks.{i}.norm2.weight", "blk.{i}.ffn_norm.weight"),
        ("blocks.{i}.norm2.weight", "blk.{i}.post_attention_norm.weight"),
        ("blocks.{i}.mixer.o.{w}", "blk.{i}.attn_output.{w}"),
        ("blocks.{i}.mixer.{p}.{w}", "blk.{i}.attn_{p}.{w}"),
        ("blocks.{i}.ffn.router.weight", "blk.{i}.ffn_gate_inp.weight"),
        ("blocks.{i}.ffn.router.correction", "blk.{i}.exp_probs_b.bias"),
        ("blocks.{i}.ffn.experts.{e}.{p}.weight", "blk.{i}.ffn_{p}.{e}.weight"),
        ("blocks.{i}.ffn.experts.{p}.weight", "blk.{i}.ffn_{p}_exps.weight"),
        ("blocks.{i}.ffn.shared.{p}.weight", "blk.{i}.ffn_{p}_shexp.weight"),
        ("blocks.{i}.ffn.shared_gate.weight", "blk.{i}.ffn_gate_inp_shexp.weight"),
        ("blocks.{i}.ffn.{p}.{w}", "blk.{i}.ffn_{p}.{w}"),
    ),
    ignored=((r"rope_freqs\.weight", "the config has it as rope factors"),),
    stacked_out_in=True,
)


def gguf_names(config: Mapping[str, Any]) -> NameTable:
    """Of the file that `config` was read from."""
    more = guessing_layers(r"blk\.", config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0))
    return replace(GGUF_NAMES, ignored=GGUF_NAMES.ignored + more)


def config_from_metadata(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: Sequence[float] = ()
) -> dict[str, Any]:
    """The config.json that a GGUF file would have had.

    `shapes` are the tensors' shapes, outermost first; `rope_factors` the values of rope_freqs.weight. Keys of
    the architecture that nobody reads are passed on under their own names, so that `declare` refuses them.
    Raises ConfigError.
    """
    arch = str(metadata.get("general.architecture"))
    if arch not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF metadata: the architecture {arch!r} is not implemented.",
            f"Proa knows {', '.join(_ARCHITECTURES)}.",
        )
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    reader = Reader(own, f"GGUF metadata of {arch}")
    config = _common(reader, shapes, rope_factors, arch in _TURN_IN_PART) | _ARCHITECTURES[arch](reader, shapes)
    config |= {f"{name}_token_id": value for name, value in _special_tokens(metadata).items()}
    return config | {prefix + key: value for key, value in reader.rest().items()}


def generation_from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would have said: sampling defaults and the tokens that end an answer."""
    ours = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in ours.items()}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {k: v for k, v in found.items() if v is not None} | ({"eos_token_id": eos} if eos else {})


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _common(c: Reader, shapes: Shapes, rope_factors: Sequence[float], in_part: bool) -> dict[str, Any]:
    """in_part: of each head some dimensions may not turn."""
    hidden, heads = c.size("embedding_length"), c.size("attention.head_count")
    head_dim = c.size("attention.key_length", hidden // heads)
    c.expect("attention.value_length", head_dim)
    turning = c.size("rope.dimension_count", head_dim)
    if not in_part:
        c.expect("rope.dimension_count", head_dim)
    c.expect("attention.causal", True)
    c.ignore("the embedding's shape says it", "vocab_size")
    c.ignore("provenance", "tensor_data_layout", "rope.scaling.finetuned")
    return {
        "vocab_size": _shape(c, shapes, "token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": c.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": c.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": c.size("feed_forward_length", None),
        "max_position_embeddings": c.size("context_length"),
        "rms_norm_eps": c.get("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(c, rope_factors),
        **({"partial_rotary_factor": turning / head_dim} if in_part else {}),
    }


def _rope(c: Reader, factors: Sequence[float]) -> dict[str, Any]:
    theta = {"rope_theta": c.get("rope.freq_base", float, 10000.0)}
    kind = c.get("rope.scaling.type", str, "none")
    factor = c.get_any(("rope.scaling.factor", "rope.scale_linear"), float, 1.0)
    original = c.get("rope.scaling.original_context_length", int, None)
    c.expect("rope.scaling.attn_factor", 1.0)
    if factors:
        if kind != "none":
            raise c.error(f"rope_freqs.weight together with rope scaling {kind!r} is not implemented")
        return theta | {"rope_type": "factors", "factors": list(factors)}
    if kind == "yarn":
        return theta | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": c.get("rope.scaling.yarn_beta_fast", float, None),
            "beta_slow": c.get("rope.scaling.yarn_beta_slow", float, None),
        }
    if kind not in ("none", "linear"):
        raise c.error(f"rope scaling {kind!r} is not implemented, only none, linear and yarn")
    return theta | ({"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"})


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
            "moe_intermediate_size": _shape(c, shapes, f"blk.{sparse}.ffn_down_exps.weight")[-1],
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


def _shape(c: Reader, shapes: Shapes, tensor: str) -> tuple[int, ...]:
    if tensor not in shapes:
        raise c.error(f"the tensor {tensor} is missing")
    return shapes[tensor]


_TURN_IN_PART = ("glm4moe", "minimax-m2")
_ARCHITECTURES: Mapping[str, Callable[[Reader, Shapes], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _dense("Qwen2ForCausalLM"),
    "qwen3": _dense("Qwen3ForCausalLM"),
    "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", renormalise=False, bias_key="qkv_bias"),
    "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", renormalise=True, bias_key="attention_bias"),
    "glm4moe": _v3_moe("Glm4MoeForCausalLM", use_qk_norm=lambda shapes: "blk.0.attn_q_norm.weight" in shapes),
    "dots1": _v3_moe("Dots1ForCausalLM"),
    "minimax-m2": _minimax_m2,
}
