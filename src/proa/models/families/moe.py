"""Llama's attention with a mixture of experts: Qwen2-MoE (and Qwen1.5-MoE), Qwen3-MoE, Mixtral."""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, model, qwen_windows
from proa.models.names import NameTable
from proa.models.spec import Mlp, Model, Moe, Router

MIXTRAL_NAMES = NameTable(
    (
        ("blocks.{i}.ffn.router.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
        ("blocks.{i}.ffn.experts.{e}.gate.weight", "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight"),
        ("blocks.{i}.ffn.experts.{e}.down.weight", "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
        ("blocks.{i}.ffn.experts.{e}.up.weight", "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight"),
    )
)


def qwen2_moe(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 32768)
    c.expect("use_mrope", False)  # multimodal rotary embedding (M-RoPE) of Qwen2-VL
    mixer = attention(c, qkv_bias=c.get("qkv_bias", bool, True))
    shared = Mlp(mixer.hidden, c.size("shared_expert_intermediate_size"))
    return model(c, mixer, qwen_ffns(c, mixer.hidden, shared), _moe_windows(c)), NameTable()


def qwen3_moe(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 32768)
    for key, implemented in {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}.items():
        c.expect(key, implemented)  # keys of other families that Qwen3-Coder's config.json has
    mixer = attention(c, qk_norm="head", **biases(c))
    return model(c, mixer, qwen_ffns(c, mixer.hidden, None), _moe_windows(c)), NameTable()


def mixtral(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 131072)
    mixer = attention(c, theta=1e6)
    moe = routed(c, mixer.hidden, c.size("num_local_experts"), c.size("intermediate_size"), renormalise=True)
    layers = c.size("num_hidden_layers")
    return model(c, mixer, [moe] * layers, [c.size("sliding_window", None)] * layers), MIXTRAL_NAMES


def routed(c: Reader, hidden: int, experts: int, width: int, *, renormalise: bool, shared: Mlp | None = None) -> Moe:
    """An MoE layer with softmax routing, and a gated shared expert if given."""
    top_k = experts_per_token(c, experts)
    router = Router("softmax", renormalise)
    return Moe(hidden, experts, top_k, width, router, shared, shared_gate=shared is not None)


def experts_per_token(c: Reader, experts: int, *keys: str) -> int:
    """Read num_experts_per_tok, which `keys` may name too. Raises ConfigError unless it is from 1 to `experts`."""
    keys = ("num_experts_per_tok", *keys)
    top_k = c.get_any(keys, int)
    if not 0 < top_k <= experts:
        named = " or ".join(keys)
        raise c.error(f"{named} must be between 1 and {experts}, the number of experts, but it is {top_k}")
    return top_k


def qwen_ffns(c: Reader, hidden: int, shared: Mlp | None) -> list[Mlp | Moe]:
    """The FFN of each layer: MoE in every decoder_sparse_step-th layer, except those in mlp_only_layers; else dense."""
    experts = c.get_any(("num_experts", "num_local_experts"), int)
    renormalise = c.get("norm_topk_prob", bool)
    sparse = routed(c, hidden, experts, c.size("moe_intermediate_size"), renormalise=renormalise, shared=shared)
    dense = Mlp(hidden, c.size("intermediate_size"))
    step, only = c.size("decoder_sparse_step", 1), c.get("mlp_only_layers", list, [])
    layers = range(c.size("num_hidden_layers"))
    return [dense if i in only or (i + 1) % step else sparse for i in layers]


def _moe_windows(c: Reader) -> list[int | None]:
    """Sliding window of each layer. layer_types is required: without it, versions of transformers disagree about which
    layers of a MoE model have the window."""
    if c.get("use_sliding_window", bool, False) and not c.has("layer_types"):
        raise c.error("use_sliding_window is true, but layer_types, which lists the layers with the window, is missing")
    return qwen_windows(c)


ARCHITECTURES = {
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
}
