"""DeepSeek-V2, DeepSeek-V3 (R1, V3.1) and Kimi-K2: latent attention, dense layers before sparse ones, shared experts
without a gate. Source: modeling_deepseek_v2.py and modeling_deepseek_v3.py in Hugging Face transformers and beside the
checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from proa.models.config_reader import Reader
from proa.models.families.llama import model_of
from proa.models.families.moe import experts_per_token
from proa.models.families.v3_moe import expert_groups, v3_ffns, v3_names
from proa.models.names import NameTable, Rules
from proa.models.rope_reader import rope
from proa.models.spec import Block, ExpertGroups, LatentAttention, Mlp, Model, Moe, Router

_RULES: Rules = (
    ("blocks.{i}.mixer.q_a_norm.weight", "model.layers.{i}.self_attn.q_a_layernorm.weight"),
    ("blocks.{i}.mixer.kv_a.weight", "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"),
    ("blocks.{i}.mixer.kv_a_norm.weight", "model.layers.{i}.self_attn.kv_a_layernorm.weight"),
)


def deepseek_v2(c: Reader) -> tuple[Model, NameTable]:
    c.expect("mlp_bias", False)
    mixer, names = latent_attention(c), v3_names(c, _RULES)
    return model_of(c, mixer.rope, [Block(mixer, ffn) for ffn in _softmax_ffns(c, mixer.hidden)]), names


def deepseek_v3(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 4096)
    c.expect("rope_interleave", True)
    c.ignore("another name of num_nextn_predict_layers", "num_mtp_layers")
    mixer, names = latent_attention(c), v3_names(c, _RULES)
    return model_of(c, mixer.rope, [Block(mixer, ffn) for ffn in v3_ffns(c, mixer.hidden, groups=(8, 4))]), names


def latent_attention(c: Reader) -> LatentAttention:
    """Read latent attention from DeepSeek's keys. Rotary is always interleaved."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    c.expect("num_key_value_heads", heads)
    c.expect("attention_bias", False)
    c.ignore("the sizes below determine them", "head_dim", "qk_head_dim")
    rotary_dim, rank = c.size("qk_rope_head_dim"), c.size("kv_lora_rank")
    if rotary_dim % 8 or rank % 8:
        raise c.error(f"qk_rope_head_dim {rotary_dim} and kv_lora_rank {rank} must be multiples of 8")
    return LatentAttention(
        hidden=hidden,
        heads=heads,
        q_rank=c.size("q_lora_rank", None),
        rank=rank,
        key_dim=c.size("qk_nope_head_dim"),
        value_dim=c.size("v_head_dim"),
        rope=replace(rope(c, rotary_dim, 10000.0), interleaved=True),
    )


def _softmax_ffns(c: Reader, hidden: int) -> list[Mlp | Moe]:
    """The FFN of each layer: dense before first_k_dense_replace, MoE after; expert weights are scaled, not
    renormalised."""
    c.expect("scoring_func", "softmax")
    c.expect("norm_topk_prob", False)
    c.expect("moe_layer_freq", 1)
    c.ignore("training and expert parallelism", "aux_loss_alpha", "seq_aux", "ep_size")
    experts, width = c.size("n_routed_experts"), c.size("moe_intermediate_size")
    top_k = experts_per_token(c, experts)
    scale = c.get("routed_scaling_factor", float, 1.0)
    router = Router("softmax", renormalise=False, groups=_groups(c, experts, top_k), scale=scale)
    shared = c.get("n_shared_experts", int, 0)
    sparse = Moe(hidden, experts, top_k, width, router, Mlp(hidden, shared * width) if shared else None)
    dense, first = Mlp(hidden, c.size("intermediate_size")), c.get("first_k_dense_replace", int, 0)
    return [dense if i < first else sparse for i in range(c.size("num_hidden_layers"))]


def _groups(c: Reader, experts: int, top_k: int) -> ExpertGroups | None:
    """Group-limited routing if topk_method asks for it; a group's score is that of its best expert."""
    limited = "group_limited_greedy"
    c.expect("topk_method", "greedy", limited)
    if c.get("topk_method", str, "greedy") == limited:
        return expert_groups(c, experts, top_k, best_of=1)
    c.ignore("unused by greedy routing", "n_group", "topk_group")
    return None


ARCHITECTURES = {"DeepseekV2ForCausalLM": deepseek_v2, "DeepseekV3ForCausalLM": deepseek_v3}
