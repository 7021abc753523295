"""gpt-oss: attention with sinks, a sliding window in every other layer, routed experts with biases and clamped SwiGLU.
Source: modeling_gpt_oss.py in Hugging Face transformers.
"""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, layer_types, model
from proa.models.names import NameTable
from proa.models.spec import Gating, Model, Moe, Router

NAMES = NameTable(
    (
        ("blocks.{i}.mixer.sinks", "model.layers.{i}.self_attn.sinks"),
        ("blocks.{i}.ffn.router.{w}", "model.layers.{i}.mlp.router.{w}"),
    ),
    alternating=True,
)


def gpt_oss(c: Reader) -> tuple[Model, NameTable]:
    bias = c.get("attention_bias", bool, True)
    mixer = attention(c, theta=150000.0, qkv_bias=bias, o_bias=bias, sinks=True)
    experts, top_k = c.size("num_local_experts"), c.get_any(("num_experts_per_tok", "experts_per_token"), int)
    if not 0 < top_k <= experts:
        raise c.error(f"num_experts_per_tok must be between 1 and {experts}, the number of experts, but it is {top_k}")
    c.expect("swiglu_alpha", 1.702)
    limit = c.get("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise c.error(f"swiglu_limit must be above 0, but it is {limit}")
    c.ignore("equals original_max_position_embeddings of the rope", "initial_context_length")
    router = Router("softmax", renormalise=True, linear_bias=True)
    width, gating = c.size("intermediate_size"), Gating("clamped_swiglu", limit)
    moe = Moe(mixer.hidden, experts, top_k, width, router, bias=True, gating=gating)
    windows = _windows(c)
    return model(c, mixer, [moe] * len(windows), windows), NAMES


def _windows(c: Reader) -> list[int | None]:
    width, names = c.size("sliding_window"), ("sliding_attention", "full_attention")
    kinds = layer_types(c, [names[i % 2] for i in range(c.size("num_hidden_layers"))], *names)
    return [width if kind == names[0] else None for kind in kinds]


ARCHITECTURES = {"GptOssForCausalLM": gpt_oss}
