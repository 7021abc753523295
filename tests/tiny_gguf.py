"""Tiny GGUF files of the models in tests/tiny.py, written with the gguf package as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tiny import TINY, tiny_reference

Array = npt.NDArray[Any]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Glm4MoeForCausalLM": "glm4moe",
    "Dots1ForCausalLM": "dots1",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Qwen3NextForCausalLM": "qwen3next",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
}
_YARN = {**TINY["deepseek-v2"].config["rope_parameters"], "mscale": 0.707}  # as large as mscale_all_dim
# Tiny models that a file says all of, and what it takes: values that GGUF has no key for are those of published models.
_ALL_SAID = (
    "llama2", "smollm2", "llama-yarn", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "mixtral", "glm4-moe",
    "glm4-moe-groups", "dots1", "minimax-m2", "ernie",
)  # fmt: skip
SAID: dict[str, dict[str, Any]] = {
    **{name: {} for name in _ALL_SAID},
    "qwen2-moe-mixed": {"norm_topk_prob": False},
    "gpt-oss": {"swiglu_limit": 7.0},
    "qwen3-next": {},
    "deepseek-v2": {"rope_parameters": _YARN},
    "deepseek-v2-lite": {"rope_parameters": _YARN},
    "deepseek-v3": {},
}
_POST_NORM = ("glm4moe", "gpt-oss", "qwen3next")  # whose norm before the FFN has another name
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q_a", "q_b", "kv_b")},
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


def make_tiny_gguf(
    name: str, file: Path, quant: str = "F32", rope_factors: tuple[float, ...] = (), down: str = "", first: str = "",
    old: bool = False, tensors_per_file: int = 0, vocabulary: bool = True, **overrides: Any,
) -> Path:  # fmt: skip
    """Write the model `tiny_reference(name, **overrides)`; its matrices as `quant` (those of FFNs that lead back into
    the residual stream as `down`, all of the first layer's FFN as `first`), all else as F32; where rows are no whole
    blocks, as F16. old: as converters of 2024 and 2025 wrote latent and linear attention.
    """
    model = tiny_reference(name, **overrides)
    arch = ARCHITECTURES[TINY[name].architecture]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=tensors_per_file)
    _write_metadata(writer, model.config, arch, old)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_tokenizer_model("gpt2" if vocabulary else "no_vocab")
    if vocabulary:
        writer.add_token_list([f"t{i}" for i in range(model.config.vocab_size)])
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    for tensor, values in gguf_tensors(model, arch, old):
        wanted = down if down and "ffn_down" in tensor else quant
        kind = gguf.GGMLQuantizationType[first if first and tensor.startswith("blk.0.ffn_") else wanted]
        if values.ndim > 1 and "ffn_gate_inp" not in tensor and tensor.endswith("weight"):
            if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = gguf.GGMLQuantizationType.F16
            writer.add_tensor(tensor, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model: Any, arch: str, old: bool) -> Iterator[tuple[str, Array]]:
    """The model's tensors under GGUF names; llama's q and k rows in interleaved order."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        if arch == "qwen3next" and stem.endswith("norm") and not stem.endswith("linear_attn.norm"):
            values = values + 1
        if stem in _TOP:
            yield f"{_TOP[stem]}.{kind}", values
            continue
        _, _, layer, rest = stem.split(".", 3)
        if rest == "self_attn.kv_b_proj" and not old:
            yield from keys_and_values(layer, values, model.config)
            continue
        if rest.startswith("linear_attn"):
            yield from linear_attention(layer, rest, kind, values, model.config, old)
            continue
        if rest == "mlp.experts":
            yield from stacks(layer, kind, values, turned=arch == "gpt-oss")
            continue
        if kind == "e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", values.reshape(-1)
            continue
        if kind == "sinks":
            yield f"blk.{layer}.attn_sinks.weight", values
            continue
        if arch in _POST_NORM and rest == "post_attention_layernorm":
            yield f"blk.{layer}.post_attention_norm.weight", values
            continue
        if arch == "llama" and _LAYER[rest] in heads:
            values = interleaved(values, heads[_LAYER[rest]])
        if rest == "mlp.shared_expert_gate":
            values = values[0]
        yield f"blk.{layer}.{_LAYER[rest]}.{kind}", values


def stacks(layer: str, kind: str, values: Array, turned: bool) -> Iterator[tuple[str, Array]]:
    """Stacks [E, 2I, H] and [E, H, I] with their biases; turned: transposed, [E, H, 2I] with interleaved gate and up,
    and [E, I, H]."""
    name, what = kind.partition("_proj")[0], "bias" if kind.endswith("_bias") else "weight"
    if turned and what == "weight":
        values = values.swapaxes(1, 2)
    halves = {"down": values}
    if name == "gate_up":
        gate, up = (values[:, ::2], values[:, 1::2]) if turned else np.split(values, 2, axis=1)
        halves = {"gate": gate, "up": up}
    for part, half in halves.items():
        yield f"blk.{layer}.ffn_{part}_exps.{what}", np.ascontiguousarray(half)


def keys_and_values(layer: str, rows: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Split kv_b into W_k per head, transposed, and W_v per head."""
    heads, keys = config.num_attention_heads, config.qk_nope_head_dim
    of_heads = rows.reshape(heads, keys + config.v_head_dim, -1)
    yield f"blk.{layer}.attn_k_b.weight", of_heads[:, :keys].swapaxes(1, 2).copy()
    yield f"blk.{layer}.attn_v_b.weight", of_heads[:, keys:].copy()


def linear_attention(
    layer: str, rest: str, kind: str, values: Array, config: Any, old: bool
) -> Iterator[tuple[str, Array]]:  # fmt: skip
    if kind == "A_log":
        yield f"blk.{layer}.ssm_a", -np.exp(values)
    elif kind == "dt_bias":
        yield f"blk.{layer}.ssm_dt.bias", values
    elif rest != "linear_attn.in_proj_qkvz":
        yield f"blk.{layer}.{_LAYER[rest]}.{kind}", values.squeeze(1) if rest == "linear_attn.conv1d" else values
    elif old:
        yield f"blk.{layer}.ssm_in.weight", values
    else:  # head by head
        keys, wide = config.linear_key_head_dim, values.shape[0] // config.linear_num_key_heads
        per_head = values.reshape(config.linear_num_key_heads, wide, -1)
        parts = np.split(per_head, [keys, 2 * keys, wide // 2 + keys], axis=1)
        flat = [part.reshape(-1, values.shape[1]) for part in parts]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate(flat[:3])
        yield f"blk.{layer}.attn_gate.weight", flat[3]


def interleaved(rows: Array, heads: int) -> Array:
    """Reorder rows of q or k, [heads x head_dim, ...], from half-split to interleaved rotary pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str, old: bool) -> None:
    guesses = config.num_nextn_predict_layers if arch == "glm4moe" else 0
    writer.add_block_count(config.num_hidden_layers + guesses)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "deepseek2":
        _write_latent_heads(writer, config, old)
    else:
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if arch == "llama" and config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen2moe", "qwen3moe", "qwen3next"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch in ("glm4moe", "dots1", "minimax-m2"):
        _write_sigmoid_experts(writer, config, arch)
    if arch == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
    if arch == "qwen3next":
        _write_linear_attention(writer, config)
    if arch == "deepseek2":
        _write_deepseek_experts(writer, config, old)
    if arch == "ernie4_5-moe":
        _write_ernie_experts(writer, config)
    if guesses:
        writer.add_nextn_predict_layers(guesses)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((2, 2), dtype=np.float32))


def _write_sigmoid_experts(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _write_ernie_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _write_latent_heads(writer: gguf.GGUFWriter, config: Any, old: bool) -> None:
    turned, rank = config.qk_rope_head_dim, config.kv_lora_rank
    own, values = config.qk_nope_head_dim + turned, config.v_head_dim
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(turned)
    writer.add_head_count_kv(config.num_attention_heads if old else 1)
    writer.add_key_length(own if old else rank + turned)
    writer.add_value_length(values if old else rank)
    if not old:
        writer.add_key_length_mla(own)
        writer.add_value_length_mla(values)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _write_deepseek_experts(writer: gguf.GGUFWriter, config: Any, old: bool) -> None:
    """Write DeepSeek's expert keys; old files of DeepSeek-V2 lack expert_gating_func."""
    sigmoid = config.model_type == "deepseek_v3"
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if sigmoid or not old:
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)


def _write_linear_attention(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
