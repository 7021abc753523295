"""DeepSeek-V2: latent attention, some dense layers, then routed experts beside shared ones that every token passes.
Source: modeling_deepseek_v2.py in Hugging Face transformers and beside the checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import model_of
from proa.models.families.moe import routed
from proa.models.names import HF_IGNORED, NameTable
from proa.models.rope_reader import rope
from proa.models.spec import Block, LatentAttention, Mlp, Model, Moe

NAMES = NameTable(
    (
        ("blocks.{i}.mixer.q_a_norm.weight", "model.layers.{i}.self_attn.q_a_layernorm.weight"),
        ("blocks.{i}.mixer.kv_a.weight", "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"),
        ("blocks.{i}.mixer.kv_a_norm.weight", "model.layers.{i}.self_attn.kv_a_layernorm.weight"),
        ("blocks.{i}.ffn.shared.{p}.weight", "model.layers.{i}.mlp.shared_experts.{p}_proj.weight"),
    ),
    ignored=HF_IGNORED,
)


def deepseek_v2(c: Reader) -> tuple[Model, NameTable]:
    c.expect("mlp_bias", False)
    mixer = latent_attention(c)
    sparse = _softmax_routed(c, mixer.hidden)
    return model_of(c, mixer.rope, [Block(mixer, ffn) for ffn in dense_first(c, sparse)]), NAMES


def latent_attention(c: Reader) -> LatentAttention:
    """Of DeepSeek's keys. The rotated dimensions are pairs of neighbours, whatever a config says about head_dim."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    c.expect("num_key_value_heads", heads)
    c.expect("attention_bias", False)
    c.ignore("the sizes below say what heads are", "head_dim", "qk_head_dim")
    turned, rank = c.size("qk_rope_head_dim"), c.size("kv_lora_rank")
    if turned % 8 or rank % 8:
        raise c.error(f"qk_rope_head_dim {turned} and kv_lora_rank {rank} must be multiples of 8")
    return LatentAttention(
        hidden=hidden,
        heads=heads,
        q_rank=c.size("q_lora_rank", None),
        rank=rank,
        key_dim=c.size("qk_nope_head_dim"),
        value_dim=c.size("v_head_dim"),
        rope=replace(rope(c, turned, 10000.0), interleaved=True),
    )


def dense_first(c: Reader, sparse: Moe) -> list[Mlp | Moe]:
    """The first first_k_dense_replace layers are dense, of the others every moe_layer_freq-th is sparse."""
    dense = Mlp(sparse.hidden, c.size("intermediate_size"))
    first, step = c.get("first_k_dense_replace", int, 0), c.size("moe_layer_freq", 1)
    layers = range(c.size("num_hidden_layers"))
    return [dense if i < first or i % step else sparse for i in layers]


def shared_experts(c: Reader, hidden: int, width: int) -> Mlp | None:
    """They are one MLP, as wide as all of them."""
    count = c.get("n_shared_experts", int, 0)
    return Mlp(hidden, count * width) if count else None


def _softmax_routed(c: Reader, hidden: int) -> Moe:
    c.expect("scoring_func", "softmax")
    c.expect("topk_method", "greedy")
    c.expect("n_group", 1)
    c.expect("topk_group", 1)
    c.expect("norm_topk_prob", False)
    c.expect("routed_scaling_factor", 1.0)
    c.ignore("training, or where experts are computed", "aux_loss_alpha", "seq_aux", "ep_size")
    width = c.size("moe_intermediate_size")
    moe = routed(c, hidden, c.size("n_routed_experts"), width, renormalise=False)
    return replace(moe, shared=shared_experts(c, hidden, width))


ARCHITECTURES = {"DeepseekV2ForCausalLM": deepseek_v2}
