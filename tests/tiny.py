"""Tiny random checkpoints of every family, written by transformers, the oracle for their logits."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from proa.models.families import declare
from proa.models.spec import Model


class TinyModel(NamedTuple):
    architecture: str
    config: dict[str, Any]


def _rope(theta: float, kind: str = "default", **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **values}


# Heads, kv heads, widths and vocabulary are all different, so that a swapped axis cannot go unnoticed;
# 2 x expert width differs from hidden, so that stacked experts fit one orientation only.
_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,  # large enough for attention and routing to matter
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_V3: dict[str, Any] = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_GLM: dict[str, Any] = {**_V3, "rope_parameters": {**_V3["rope_parameters"], "partial_rotary_factor": 0.5}}
_YARN = _rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32.0, beta_slow=1.0)
_LLAMA3 = _rope(
    5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def _model(architecture: str, **config: Any) -> TinyModel:
    return TinyModel(architecture, {**_BASE, **config})


TINY: dict[str, TinyModel] = {
    "llama2": _model("LlamaForCausalLM", num_key_value_heads=4, rope_parameters=_rope(1e4)),
    "llama3.1": _model("LlamaForCausalLM", rope_parameters=_LLAMA3),
    "smollm2": _model("LlamaForCausalLM", tie_word_embeddings=True, rope_parameters=_rope(1e5)),
    "llama-bias": _model(
        "LlamaForCausalLM", attention_bias=True, mlp_bias=True, head_dim=24, rope_parameters=_rope(1e4)
    ),
    # Heads of no multiple of 8 dimensions, as OpenLLaMA-3B has them (100), and of no multiple of 4.
    "llama-linear": _model("LlamaForCausalLM", head_dim=20, rope_parameters=_rope(1e4, "linear", factor=4.0)),
    "llama-dynamic": _model(
        "LlamaForCausalLM",
        head_dim=18,
        max_position_embeddings=32,
        rope_parameters=_rope(1e4, "dynamic", factor=4.0),
    ),
    "llama-yarn": _model("LlamaForCausalLM", rope_parameters=_YARN),
    "qwen2": _model("Qwen2ForCausalLM", rope_parameters=_rope(1e6)),
    "qwen2-window": _model(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        rope_parameters=_rope(1e6),
    ),
    "qwen3": _model("Qwen3ForCausalLM", head_dim=32, rope_parameters=_rope(1e6)),
    "qwen2-moe": _model(
        "Qwen2MoeForCausalLM",
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
        rope_parameters=_rope(1e6),
        **_MOE,
    ),
    "qwen2-moe-mixed": _model(
        "Qwen2MoeForCausalLM",
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        num_hidden_layers=4,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        rope_parameters=_rope(1e6),
        **_MOE,
    ),
    "qwen3-moe": _model("Qwen3MoeForCausalLM", head_dim=32, norm_topk_prob=True, rope_parameters=_rope(1e7), **_MOE),
    "olmoe": _model(
        "OlmoeForCausalLM", num_experts=8, num_experts_per_tok=3, norm_topk_prob=False, rope_parameters=_rope(1e4)
    ),
    "qwen3-next": _model(
        "Qwen3NextForCausalLM",
        # With random weights a first token's q and k may be at right angles but for rounding, and the gated norm makes
        # as much of that as of anything: a larger eps keeps such rows from deciding how far a whole model is off.
        rms_norm_eps=1e-3,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        rope_parameters=_rope(1e7, partial_rotary_factor=0.25),
        **_MOE,
    ),
    "glm4-moe": _model("Glm4MoeForCausalLM", attention_bias=True, use_qk_norm=True, **_GLM),
    "glm4-moe-groups": _model(
        "Glm4MoeForCausalLM", n_group=4, topk_group=2, routed_scaling_factor=1.0, use_qk_norm=False, **_GLM
    ),
    "dots1": _model("Dots1ForCausalLM", n_shared_experts=2, sliding_window=None, **_V3),
    "ernie": _model(
        "Ernie4_5_MoeForCausalLM",
        num_hidden_layers=5,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=24,
        moe_num_shared_experts=2,
        rope_parameters=_rope(5e5),
    ),
    "minimax-m2": _model(
        "MiniMaxM2ForCausalLM",
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=_rope(5e6, partial_rotary_factor=0.5),
    ),
    "gpt-oss": _model(
        "GptOssForCausalLM",
        num_hidden_layers=4,
        head_dim=32,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=8,
        swiglu_limit=1.5,  # low enough for some to be clamped
        rope_parameters=_rope(
            1.5e5,
            "yarn",
            factor=32.0,
            original_max_position_embeddings=64,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    ),
    "granite-moe": _model(
        "GraniteMoeForCausalLM",
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=1.7,
        rope_parameters=_rope(1e4),
    ),
    "mixtral": _model(
        "MixtralForCausalLM",
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        rope_parameters=_rope(1e6),
    ),
    "mixtral-window": _model(
        "MixtralForCausalLM",
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters=_rope(1e6),
    ),
}


# Latents, keys and values of heads are of different widths.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        **_rope(1e4, "yarn", factor=40.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0),
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
}
TINY |= {
    "deepseek-v2": _model(
        "DeepseekV2ForCausalLM", n_shared_experts=1, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        norm_topk_prob=False, routed_scaling_factor=4.0, **_LATENT,
    ),
    "deepseek-v2-lite": _model(
        "DeepseekV2ForCausalLM", n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, **{**_LATENT, "q_lora_rank": None},
    ),
    "deepseek-v3": _model(
        "DeepseekV3ForCausalLM", n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, num_mtp_layers=0, **{**_LATENT, "rope_parameters": _rope(1e4)},
    ),
}  # fmt: skip


def tiny_reference(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 and eval mode; every 1-D tensor is perturbed, so that a norm or bias
    that is not applied shows in the logits, and a correction chooses. `overrides` replace config keys."""
    architecture, config = TINY[name]
    model_class = getattr(transformers, architecture)
    settings = model_class.config_class(**{**config, **overrides, "dtype": "float32"})
    torch.manual_seed(seed)
    model = model_class(settings).float().eval()
    noise = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        vectors = [t for name, t in model.named_parameters() if t.dim() <= 1 or name.endswith("_bias")]
        corrections = [t for name, t in model.named_buffers() if name.endswith(_CORRECTION)]
        for tensor in vectors + corrections:
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
    return model


_WRITTEN: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}  # files, and torch's random numbers after them
_MOST_WRITTEN = 3 << 20  # bytes of a checkpoint that is kept for the next test


def make_tiny(name: str, folder: Path, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write the checkpoint of `tiny_reference` to `folder` (replaced if it exists) and return it.

    transformers makes each once in a process: a hundred tests ask for the same one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    key = repr((name, seed, max_shard_size, sorted(overrides.items())))
    if key in _WRITTEN:
        files, random_state = _WRITTEN[key]
        folder.mkdir(parents=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        torch.set_rng_state(random_state)
        return folder
    tiny_reference(name, seed, **overrides).save_pretrained(folder, max_shard_size=max_shard_size)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if sum(map(len, files.values())) <= _MOST_WRITTEN:
        _WRITTEN[key] = files, torch.get_rng_state()
    return folder


def reference_params(model: Any) -> dict[str, torch.Tensor]:
    """The transformers model's parameters under Proa's names, as views: writing to them changes the model."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.removeprefix("model.").rpartition(".")
        if not stem.startswith("layers."):
            found[f"{_OUTER[stem]}.{kind}"] = tensor
            continue
        _, layer, part = stem.split(".", 2)
        block = f"blocks.{layer}"
        if not part.endswith(".experts"):
            values = tensor.view(-1) if kind == _CORRECTION else tensor  # ERNIE's are [1, E]
            found[f"{block}.{_INNER[part]}.{_VECTORS.get(kind, kind)}"] = values
            continue
        gpt_oss = model.config.model_type == "gpt_oss"
        both, ours = kind.removesuffix("_bias").removesuffix("_proj"), "bias" if kind.endswith("_bias") else "weight"
        for expert, stacked in enumerate(tensor):  # gate_up_proj [E, 2I, H], down_proj [E, H, I]; of gpt-oss turned
            stacked = stacked.T if gpt_oss and ours == "weight" else stacked
            halves = [stacked] if both == "down" else [stacked[::2], stacked[1::2]] if gpt_oss else stacked.chunk(2)
            for which, half in zip(both.split("_"), halves, strict=True):
                found[f"{block}.ffn.experts.{expert}.{which}.{ours}"] = half
    if model.config.tie_word_embeddings:
        del found["head.weight"]
    return found


_CORRECTION = "e_score_correction_bias"
_VECTORS = {"A_log": "a_log", _CORRECTION: "correction"}
_OUTER = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head"}
_INNER = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    **{f"self_attn.{p}_proj": f"mixer.{p}" for p in "qkvo"},
    **{f"self_attn.{p}_norm": f"mixer.{p}_norm" for p in "qk"},
    **{f"mlp.{p}_proj": f"ffn.{p}" for p in ("gate", "up", "down")},
    "mlp.gate": "ffn.router",
    "block_sparse_moe.router": "ffn.router",
    "mlp": "ffn.router",  # MiniMax's correction
    "mlp.router": "ffn.router",
    "self_attn": "mixer",
    "mlp.gate.moe_statics": "ffn.router",
    **{f"mlp.shared_expert.{p}_proj": f"ffn.shared.{p}" for p in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{p}_proj": f"ffn.shared.{p}" for p in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn.shared_gate",
    **{f"self_attn.{p}_proj": f"mixer.{p}" for p in ("q_a", "q_b", "kv_b")},
    "self_attn.kv_a_proj_with_mqa": "mixer.kv_a",
    **{f"self_attn.{p}_layernorm": f"mixer.{p}_norm" for p in ("q_a", "kv_a")},
    "linear_attn": "mixer",
    **{f"linear_attn.in_proj_{p}": f"mixer.{p}" for p in ("qkvz", "ba")},
    "linear_attn.conv1d": "mixer.conv",
    "linear_attn.norm": "mixer.norm",
    "linear_attn.out_proj": "mixer.out",
}


@functools.cache
def tiny_spec(name: str) -> Model:
    """The spec of a tiny model, from its config alone."""
    architecture, config = TINY[name]
    settings = getattr(transformers, architecture).config_class(**config)
    values = json.loads(settings.to_json_string(use_diff=False))
    return declare(values | {"architectures": [architecture]}).spec
