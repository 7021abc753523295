"""DeepSeek's families: what they read from configs, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from proa.errors import ConfigError
from proa.layers.rope import score_factor
from proa.models.families import declare
from proa.models.spec import ExpertGroups, Latent, LatentAttention, Mlp, Model, Moe, Rope, Router

# config.json of DeepSeek-V2-Lite, without the keys that every family reads.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

# The keys that differ in DeepSeek-V3's and Kimi-K2's.
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2: dict[str, Any] = {
    **V3,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def spec_of(**values: Any) -> Model:
    return declare({**V2_LITE, **values}).spec


def test_deepseek_v2_lite() -> None:
    spec = spec_of()
    mixer = spec.blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert {block.mixer for block in spec.blocks} == {mixer}
    assert (mixer.heads, mixer.q_rank, mixer.rank, mixer.key_dim, mixer.value_dim) == (16, None, 512, 128, 128)
    assert (mixer.rope.dim, mixer.rope.interleaved, mixer.norm_eps) == (64, True, 1e-6)
    assert mixer.caches == (Latent(512, 64),)
    assert spec.kv_bytes_per_token(2) == 27 * 576 * 2
    assert spec.blocks[0].ffn == Mlp(2048, 10944)
    assert {block.ffn for block in spec.blocks[1:]} == {
        Moe(2048, 64, 6, 1408, Router("softmax", False), Mlp(2048, 2 * 1408))
    }
    assert spec.max_positions == 163840
    assert spec.num_params == 15_706_484_224  # as its model card counts them, 15.7B
    assert score_factor(mixer.rope) == pytest.approx((0.1 * 0.707 * 3.6888794541139363 + 1) ** 2)


@pytest.mark.parametrize(
    ("config", "parameters", "heads", "groups", "dense", "scale", "context"),
    [
        (V3, 671_026_419_200, 128, ExpertGroups(8, 4, 2), 3, 2.5, 163840),
        (KIMI_K2, 1_026_408_232_448, 64, None, 1, 2.827, 131072),
    ],
    ids=["deepseek-v3", "kimi-k2"],
)
def test_deepseek_v3(
    config: dict[str, Any], parameters: int, heads: int, groups: ExpertGroups | None, dense: int, scale: float,
    context: int,
) -> None:  # fmt: skip
    declared = declare(config)
    spec = declared.spec
    mixer = spec.blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert (mixer.heads, mixer.q_rank, mixer.rank, mixer.rope.interleaved) == (heads, 1536, 512, True)
    assert spec.num_params == parameters
    assert [isinstance(block.ffn, Mlp) for block in spec.blocks] == [True] * dense + [False] * (61 - dense)
    assert isinstance(spec.blocks[-1].ffn, Moe)
    assert spec.blocks[-1].ffn.router == Router("sigmoid", True, True, groups, scale, 1e-20)
    assert spec.blocks[-1].ffn.shared == Mlp(7168, 2048)
    assert spec.max_positions == context
    ahead = "model.layers.61.eh_proj.weight"
    assert (declared.names.why_ignored(ahead) is None) == (config["num_nextn_predict_layers"] == 0)


def test_groups_that_a_config_of_v3_does_not_name() -> None:
    missing = {key: value for key, value in V3.items() if key not in ("n_group", "topk_group")}
    assert declare(missing).spec == declare(V3).spec


def test_groups_of_deepseek_v2() -> None:
    limited = {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
    ffn = spec_of(**limited).blocks[-1].ffn
    assert isinstance(ffn, Moe)
    assert ffn.router == Router("softmax", False, False, ExpertGroups(8, 3, 1), 16.0)
    greedy = spec_of(**{**limited, "topk_method": "greedy"}).blocks[-1].ffn
    assert isinstance(greedy, Moe)
    assert greedy.router.groups is None


@pytest.mark.parametrize(("first", "sparse"), [(0, [0, 1, 2, 3, 4, 5]), (3, [3, 4, 5])])
def test_dense_layers_before_sparse_ones(first: int, sparse: list[int]) -> None:
    blocks = spec_of(num_hidden_layers=6, first_k_dense_replace=first).blocks
    assert [i for i, block in enumerate(blocks) if isinstance(block.ffn, Moe)] == sparse


def test_v3_without_dense_layers() -> None:
    blocks = declare({**V3, "first_k_dense_replace": 0}).spec.blocks
    assert all(isinstance(block.ffn, Moe) for block in blocks)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "--ignore-config-key attn_logit_softcapping"),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8 is not implemented"),
        ({"kv_lora_rank": 500}, "multiples of 8"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True is not implemented"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, "n_group 7"),
        ({"num_experts_per_tok": 65}, "between 1 and 64, the number of experts"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(**values)


def test_as_transformers_5_writes_it() -> None:
    rope = {**V2_LITE["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    new = {**V2_LITE, "rope_parameters": rope, "head_dim": 64, "mlp_bias": False, "pad_token_id": None}
    del new["rope_scaling"], new["rope_theta"]
    assert declare(new).spec == spec_of()


def test_only_yarn_with_mscale_all_dim_scales_scores() -> None:
    assert score_factor(Rope(64)) == 1.0
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    mixer = spec_of(rope_scaling=scaling).blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert score_factor(mixer.rope) == 1.0
