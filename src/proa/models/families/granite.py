"""Granite-MoE (IBM Granite 3.0 and 3.1 MoE): Mixtral's layers with factors of embeddings, scores, residuals and logits.
Source: modeling_granitemoe.py in Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import attention, biases, model
from proa.models.families.moe import routed
from proa.models.names import NameTable
from proa.models.spec import Model

_MOE = "model.layers.{i}.block_sparse_moe"
NAMES = NameTable(
    (
        ("blocks.{i}.ffn.router.weight", f"{_MOE}.router.layer.weight"),
        ("blocks.{i}.ffn.experts.gate_up.weight", f"{_MOE}.input_linear.weight"),
        ("blocks.{i}.ffn.experts.down.weight", f"{_MOE}.output_linear.weight"),
    ),
    stacked_out_in=True,
)


def granite_moe(c: Reader) -> tuple[Model, NameTable]:
    mixer = attention(c, scale=c.get("attention_multiplier", float, 1.0), **biases(c))
    moe = routed(c, mixer.hidden, c.size("num_local_experts"), c.size("intermediate_size"), renormalise=True)
    divisor = c.get("logits_scaling", float, 1.0)
    if divisor <= 0:
        raise c.error(f"logits_scaling must be positive, but it is {divisor}")
    embeddings, residuals = (c.get(f"{of}_multiplier", float, 1.0) for of in ("embedding", "residual"))
    spec = model(c, mixer, [moe] * c.size("num_hidden_layers"))
    spec = replace(spec, embedding_factor=embeddings, residual_factor=residuals, logits_factor=1 / divisor)
    return spec, NAMES


ARCHITECTURES = {"GraniteMoeForCausalLM": granite_moe}
