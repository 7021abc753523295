"""OLMoE: routed experts only, and RMSNorm over whole q and k. Source: modeling_olmoe.py in Hugging Face transformers.

CONTRIBUTING.md builds this file step by step.
"""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, model
from proa.models.families.moe import routed
from proa.models.names import NameTable
from proa.models.spec import Model


def olmoe(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 4096)
    c.expect("clip_qkv", None)
    mixer = attention(c, qk_norm="full", **biases(c))
    moe = routed(
        c, mixer.hidden, c.size("num_experts"), c.size("intermediate_size"), renormalise=c.get("norm_topk_prob", bool)
    )
    return model(c, mixer, [moe] * c.size("num_hidden_layers")), NameTable()


ARCHITECTURES = {"OlmoeForCausalLM": olmoe}
