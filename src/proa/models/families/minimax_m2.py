"""MiniMax-M2: attention with partial rotary and an RMSNorm over all heads of q and k, and in every layer experts with
sigmoid scores and a correction. Source: modeling_minimax_m2.py in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, model
from proa.models.families.moe import MIXTRAL_NAMES, experts_per_token
from proa.models.names import NameTable
from proa.models.spec import Model, Moe, Router

_BIAS = ("blocks.{i}.ffn.router.correction", "model.layers.{i}.block_sparse_moe.e_score_correction_bias")
NAMES = replace(MIXTRAL_NAMES, rules=(*MIXTRAL_NAMES.rules, _BIAS))


def minimax_m2(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 196608)
    layers, rotary_dim = c.size("num_hidden_layers"), c.size("rotary_dim", None)
    partial = rotary_dim / c.size("head_dim") if rotary_dim else 1.0
    mixer = attention(c, theta=5e6, partial=partial, qk_norm="full")
    if rotary_dim not in (None, mixer.rope.dim):
        raise c.error(f"rotary_dim is {rotary_dim}, but partial_rotary_factor gives {mixer.rope.dim}")
    _expect_m2(c, layers)
    router = Router("sigmoid", renormalise=True, correction=True)
    experts = c.get_any(("num_local_experts", "num_experts"), int)
    moe = Moe(mixer.hidden, experts, experts_per_token(c, experts), c.size("intermediate_size"), router)
    return model(c, mixer, [moe] * layers), NAMES


def _expect_m2(c: Reader, layers: int) -> None:
    """Check the keys that M2 inherits from earlier MiniMax models, of which it uses one setting only."""
    c.expect("attn_type_list", [1] * layers)
    c.expect("use_qk_norm", True)
    c.expect("qk_norm_type", "per_layer")
    c.expect("scoring_func", "sigmoid")
    c.expect("use_routing_bias", True)
    c.expect("shared_intermediate_size", 0)
    c.expect("sliding_window")
    c.expect("postnorm", False)
    for part in ("full_attention", "linear_attention", "mlp"):
        for factor in ("alpha", "beta"):
            c.expect(f"layernorm_{part}_{factor}", 1.0, 1)
    c.ignore("no dense layers, no shared experts", "mlp_intermediate_size", "shared_moe_mode")
    c.ignore("MTP layers are not loaded", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")


ARCHITECTURES = {"MiniMaxM2ForCausalLM": minimax_m2}
