"""Llama's attention with DeepSeek-V3's routed experts: sigmoid scores with a correction, group-limited routing, dense
layers before MoE layers, shared experts without a gate. GLM-4.5, 4.6, 4.7 and their Air; dots.llm1.

Belongs here too: the readers shared by every family with these experts. Sources: modeling_glm4_moe.py and
modeling_dots1.py in Hugging Face transformers.
"""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, layer_windows, model
from proa.models.names import HF_IGNORED, NameTable, Rules, ignored_mtp
from proa.models.spec import ExpertGroups, Mlp, Model, Moe, Router

_EPSILON = 1e-20  # added to the sum of sigmoids that renormalising divides by


def glm4_moe(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 131072)
    normed = c.get("use_qk_norm", bool, False)
    bias = c.get("attention_bias", bool, False)
    mixer = attention(c, partial=0.5, qk_norm="head" if normed else "none", qkv_bias=bias)
    names = v3_names(c)
    return model(c, mixer, v3_ffns(c, mixer.hidden)), names


def dots1(c: Reader) -> tuple[Model, NameTable]:
    mixer = attention(c, qk_norm="head", **biases(c))
    names = v3_names(c)
    return model(c, mixer, v3_ffns(c, mixer.hidden), _windows(c)), names


def _windows(c: Reader) -> list[int | None]:
    """Sliding window of each layer, in tokens; None: full attention. From `layer_types`, else all layers from
    max_window_layers on if the config has a sliding_window."""
    layers, width = c.size("num_hidden_layers"), c.size("sliding_window", None)
    first = c.get("max_window_layers", int, layers) if width else layers
    c.ignore("unused without a window", "max_window_layers")
    found = layer_windows(c, width or 0, [i >= first for i in range(layers)])
    if found != [None] * layers and (width is None or not c.get("use_sliding_window", bool, True)):
        raise c.error("layer_types has sliding_attention layers, but sliding_window is missing or switched off")
    c.ignore("layer_types and sliding_window decide", "use_sliding_window")
    return found


def v3_ffns(c: Reader, hidden: int, groups: tuple[int, int] = (1, 1)) -> list[Mlp | Moe]:
    """The FFN of each layer: dense before first_k_dense_replace, MoE after. groups: defaults of n_group, topk_group."""
    c.expect("scoring_func", "sigmoid", "noaux_tc")
    c.expect("topk_method", "noaux_tc")
    c.expect("moe_layer_freq", 1)
    c.expect("moe_router_dtype", "float32")
    c.ignore("training and expert parallelism", "aux_loss_alpha", "seq_aux", "ep_size")
    layers, dense = c.size("num_hidden_layers"), c.get("first_k_dense_replace", int)
    c.ignore("unused without dense layers", "intermediate_size")
    sparse = v3_moe(c, hidden, groups)
    return [Mlp(hidden, c.size("intermediate_size")) if i < dense else sparse for i in range(layers)]


def v3_moe(c: Reader, hidden: int, groups: tuple[int, int]) -> Moe:
    """Read the MoE layer that all layers behind the dense ones share; groups: as in v3_ffns. Raises ConfigError."""
    experts, top_k, width = c.size("n_routed_experts"), c.size("num_experts_per_tok"), c.size("moe_intermediate_size")
    shared = c.get("n_shared_experts", int, 0)
    router = Router(
        "sigmoid",
        renormalise=c.get("norm_topk_prob", bool),
        correction=True,
        groups=expert_groups(c, experts, top_k, best_of=2, defaults=groups),
        scale=c.get("routed_scaling_factor", float),
        epsilon=_EPSILON,
    )
    return Moe(hidden, experts, top_k, width, router, Mlp(hidden, width * shared) if shared else None)


def expert_groups(
    c: Reader, experts: int, top_k: int, best_of: int, defaults: tuple[int, int] = (1, 1)
) -> ExpertGroups | None:
    """Read group-limited routing: the best topk_group of n_group groups; None if all groups are kept. Raises
    ConfigError."""
    groups, kept = c.size("n_group", defaults[0]), c.size("topk_group", defaults[1])
    size, rest = divmod(experts, groups)
    if rest or size < best_of or kept > groups or kept * size < top_k:
        raise c.error(
            f"n_group {groups} and topk_group {kept} do not fit {experts} experts with {top_k} per token: groups must "
            f"be of equal size, with at least {best_of} experts each, and the kept ones hold {top_k} experts"
        )
    return None if kept == groups else ExpertGroups(groups, kept, best_of)


def v3_names(c: Reader, rules: Rules = ()) -> NameTable:
    """Hugging Face's names, except for those of `rules`; MTP layers are ignored."""
    mtp_layers = c.get("num_nextn_predict_layers", int, 0)
    mtp = ignored_mtp(r"model\.layers\.", c.size("num_hidden_layers"), mtp_layers)
    return NameTable(rules, ignored=HF_IGNORED + mtp)


ARCHITECTURES = {"Glm4MoeForCausalLM": glm4_moe, "Dots1ForCausalLM": dots1}
