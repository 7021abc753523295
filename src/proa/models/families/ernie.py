"""ERNIE 4.5 MoE: interleaved rotary, softmax scores with a correction, shared experts without a gate.
Source: modeling_ernie4_5_moe.py in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, model
from proa.models.families.moe import experts_per_token
from proa.models.names import HF_IGNORED, MTP_NOT_LOADED, NameTable
from proa.models.spec import Mlp, Model, Moe, Router

NAMES = NameTable(
    (("blocks.{i}.ffn.router.correction", "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"),),
    ignored=(*HF_IGNORED, (r"model\.mtp_.*", MTP_NOT_LOADED)),
)


def ernie4_5_moe(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 131072)
    c.expect("use_bias", False)
    c.expect("moe_gate", "topk", "topk_fused")  # the latter, in the 300B models, names a kernel of the same rule
    c.expect("moe_use_aux_free", True)
    c.ignore("only for training and MTP", "moe_capacity", "num_nextn_predict_layers")
    mixer = attention(c, theta=5e5)
    mixer = replace(mixer, rope=replace(mixer.rope, interleaved=True))
    return model(c, mixer, _ffns(c, mixer.hidden), tied=True), NAMES


def _ffns(c: Reader, hidden: int) -> list[Mlp | Moe]:
    """The FFN of each layer: MoE every moe_layer_interval layers from moe_layer_start_index to moe_layer_end_index
    (included; -1: the last layer), else dense."""
    experts = c.get_any(("moe_num_experts", "num_experts"), int)
    top_k = experts_per_token(c, experts, "moe_k")
    width, shared = c.size("moe_intermediate_size"), c.get("moe_num_shared_experts", int)
    router = Router("softmax", renormalise=True, correction=True, least=c.get("moe_norm_min", float, 1e-12))
    sparse = Moe(hidden, experts, top_k, width, router, Mlp(hidden, width * shared) if shared else None)
    dense, layers = Mlp(hidden, c.size("intermediate_size")), c.size("num_hidden_layers")
    first, last = c.get("moe_layer_start_index", int), c.get("moe_layer_end_index", int, -1)
    candidates, step = range(first, layers if last == -1 else last + 1), c.size("moe_layer_interval", 1)
    return [sparse if i in candidates and (i + 1) % step == 0 else dense for i in range(layers)]


ARCHITECTURES = {"Ernie4_5_MoeForCausalLM": ernie4_5_moe}
