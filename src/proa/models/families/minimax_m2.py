"""MiniMax-M2: attention whose queries and keys are normalised over all heads together and turn in part, and in every
layer experts with sigmoid scores and a correction. Source: modeling_minimax_m2.py in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, model
from proa.models.families.moe import MIXTRAL_NAMES, routed
from proa.models.names import NameTable
from proa.models.spec import Model, Router

_BIAS = ("blocks.{i}.ffn.router.correction", "model.layers.{i}.block_sparse_moe.e_score_correction_bias")
NAMES = replace(MIXTRAL_NAMES, rules=(*MIXTRAL_NAMES.rules, _BIAS))


def minimax_m2(c: Reader) -> tuple[Model, NameTable]:
    layers, turning = c.size("num_hidden_layers"), c.size("rotary_dim", None)
    partial = turning / c.size("head_dim") if turning else 1.0
    mixer = attention(c, theta=5e6, partial=partial, qk_norm="full")
    if turning not in (None, mixer.rope.dim):
        raise c.error(f"rotary_dim is {turning}, but partial_rotary_factor says {mixer.rope.dim}")
    _same_as_its_name_says(c, layers)
    router = Router("sigmoid", renormalise=True, correction=True)
    experts = c.get_any(("num_local_experts", "num_experts"), int)
    moe = replace(routed(c, mixer.hidden, experts, c.size("intermediate_size"), renormalise=True), router=router)
    return model(c, mixer, [moe] * layers), NAMES


def _same_as_its_name_says(c: Reader, layers: int) -> None:
    """Keys of the models before it, which could do otherwise."""
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
    c.ignore("no layer is dense, and nothing is shared", "mlp_intermediate_size", "shared_moe_mode")
    c.ignore("decoding does without guesses", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")


ARCHITECTURES = {"MiniMaxM2ForCausalLM": minimax_m2}
