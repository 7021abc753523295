"""gpt-oss: attention with sinks, a sliding window in every other layer, routed experts with biases and clamped SwiGLU.
Source: modeling_gpt_oss.py in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, layer_windows, model
from proa.models.families.moe import experts_per_token
from proa.models.names import NameTable
from proa.models.spec import Gating, Model, Moe, RopeScaling, Router

NAMES = NameTable(
    (
        ("blocks.{i}.mixer.sinks", "model.layers.{i}.self_attn.sinks"),
        ("blocks.{i}.ffn.router.{w}", "model.layers.{i}.mlp.router.{w}"),
    ),
    alternating=True,
)


# Of a config that says nothing about it.
_YARN = RopeScaling("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)


def gpt_oss(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 131072)
    mixer = attention(c, theta=150000.0, sinks=True, **biases(c, default=True))
    if not (c.has("rope_parameters") or c.has("rope_scaling")):
        mixer = replace(mixer, rope=replace(mixer.rope, scaling=_YARN))
    experts = c.size("num_local_experts")
    top_k = experts_per_token(c, experts, "experts_per_token")
    c.expect("swiglu_alpha", 1.702)
    limit = c.get("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise c.error(f"swiglu_limit must be above 0, but it is {limit}")
    c.ignore("equals original_max_position_embeddings of the rope", "initial_context_length")
    router = Router("softmax", renormalise=True, linear_bias=True)
    width, gating = c.size("intermediate_size"), Gating("clamped_swiglu", limit)
    moe = Moe(mixer.hidden, experts, top_k, width, router, bias=True, gating=gating)
    layers = c.size("num_hidden_layers")
    by_layer = layer_windows(c, c.size("sliding_window"), [i % 2 == 0 for i in range(layers)])
    return model(c, mixer, [moe] * layers, by_layer), NAMES


ARCHITECTURES = {"GptOssForCausalLM": gpt_oss}
