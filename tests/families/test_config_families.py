"""The families: what they read from configs, and what they refuse: no unimplemented config may be accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proa.errors import ConfigError
from proa.models.families import declare
from proa.models.spec import (
    Attention,
    ExpertGroups,
    GatedDeltaNet,
    Gating,
    Mlp,
    Model,
    Moe,
    RopeScaling,
    Router,
)

SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
}
_QWEN3: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_V3: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# What each architecture needs beyond SHAPES.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "LLaMAForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen2MoeForCausalLM": {**_QWEN3, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": _QWEN3,
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3NextForCausalLM": {
        **_QWEN3,
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "Glm4MoeForCausalLM": {**_V3, "partial_rotary_factor": 1.0},
    "Dots1ForCausalLM": _V3,
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "rope_theta": 1e4,
    },
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e4},
    "GptOssForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
}


def config(architecture: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SHAPES, **ARCHITECTURES[architecture], **values}


def spec_of(architecture: str, **values: Any) -> Model:
    return declare(config(architecture, **values)).spec


def mixer_of(architecture: str, **values: Any) -> Attention:
    return next(mixer for mixer in spec_of(architecture, **values).mixers if isinstance(mixer, Attention))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_minimal_config(architecture: str) -> None:
    spec = spec_of(architecture)
    assert len(spec.blocks) == 4
    theta = {"MixtralForCausalLM": 1e6, "GptOssForCausalLM": 150000.0}.get(architecture, 1e4)
    assert {rope.base for rope in spec.ropes} == {theta}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "--ignore-config-key attn_logit_softcapping"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "'vocab_size' must be a value of type int, but it is 'many'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be at least 1"),
        ({"rms_norm_eps": True}, "'rms_norm_eps' must be a value of type float"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor .*0.2"),
        ({"head_dim": 15}, "even head_dim"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not implemented"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "must agree"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "surprise": 1}}, "--ignore-config-key surprise"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "the quantisation 'bitsandbytes' is not implemented",
        ),
        ({"quantization_config": {"quant_method": "fp8", "surprise": 1}}, "--ignore-config-key surprise"),
        ({"rope_scaling": {"type": "factors", "factors": [1.0]}}, "1 rope factors for [82] frequencies"),
        ({"compression_config": {"quant_method": "hqq"}}, "'hqq'"),
    ],
)
def test_refused_by_every_family(architecture: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(architecture, **values)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "between 1 and 8, the number of experts, but it is 9"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not implemented"),
        ("Glm4MoeForCausalLM", {"num_experts_per_tok": 9}, "with 9 per token"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "n_group 3"),
        ("Glm4MoeForCausalLM", {"n_group": 8, "topk_group": 4}, "n_group 8"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group 1"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": None}, "'first_k_dense_replace' is missing"),
        ("Glm4MoeForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented"),
        ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
        ("Dots1ForCausalLM", {"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        ("Dots1ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing or switched off"),
        ("Dots1ForCausalLM", {"layer_types": ["full_attention"] * 3, "sliding_window": 8}, "layer_types"),
        ("Ernie4_5_MoeForCausalLM", {"moe_k": 9}, "the number of experts, but it is 9"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias = True is not implemented"),
        ("Ernie4_5_MoeForCausalLM", {"moe_gate": "top2_fused"}, "moe_gate"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 8, "head_dim": 16, "partial_rotary_factor": 1.0}, "rotary_dim is 8"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ("MiniMaxM2ForCausalLM", {"use_routing_bias": False}, "use_routing_bias"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 32}, "shared_intermediate_size"),
        ("MiniMaxM2ForCausalLM", {"layernorm_mlp_alpha": 3.5}, "layernorm_mlp_alpha"),
        (
            "Qwen3NextForCausalLM",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads must be a multiple of linear_num_key_heads 2, but it is 3",
        ),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ("Qwen3NextForCausalLM", {"use_sliding_window": True}, "use_sliding_window = True is not implemented"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention layer"),
        ("GptOssForCausalLM", {"experts_per_token": 3}, "must agree"),
        ("GptOssForCausalLM", {"num_experts_per_tok": 9}, "between 1 and 8, the number of experts, but it is 9"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not implemented"),
        ("GptOssForCausalLM", {"swiglu_limit": 0}, "swiglu_limit must be above 0"),
        ("GptOssForCausalLM", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("GptOssForCausalLM", {"sliding_window": 0}, "'sliding_window' must be at least 1"),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4", "extra": 1}}, "extra"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": None}, "'norm_topk_prob' is missing"),
        ("Qwen3MoeForCausalLM", {"qkv_bias": True}, "qkv_bias = True is not implemented"),
        ("Qwen3MoeForCausalLM", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": False}, "use_qk_norm = False is not implemented"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope = True is not implemented"),
        ("Qwen2ForCausalLM", {"rope_theta": 1e6, "rotary_emb_base": 1e5}, "rotary_emb_base = 100000.0 .* only 1000000"),
        ("Glm4MoeForCausalLM", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16' is not implemented"),
        ("Qwen3MoeForCausalLM", {"num_local_experts": 4}, "must agree"),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "sliding_window is 0"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_freq_factor",
        ),
        ("LlamaForCausalLM", {"mixture": True, "extra": 1}, "2 key.s. .* extra = 1, mixture = True"),
    ],
)
def test_refused(architecture: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(architecture, **values)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["Qwen3ForCausalML"], "Did you mean Qwen3ForCausalLM"),
        (["GPT2LMHeadModel"], "'GPT2LMHeadModel' is not implemented. Proa knows .*LlamaForCausalLM"),
        ([], "must be a list with one name"),
        (None, "must be a list with one name"),
        ("LlamaForCausalLM", "must be a list with one name"),
    ],
)
def test_unknown_architecture(architectures: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare({**SHAPES, "architectures": architectures})


def test_unknown_key_can_be_accepted() -> None:
    odd = config("LlamaForCausalLM", oddity=1, rope_scaling={"type": "linear", "factor": 2.0, "odd": 1})
    with pytest.raises(ConfigError, match="oddity"):
        declare(odd)
    with pytest.raises(ConfigError, match="rope_scaling: 1 key"):
        declare(odd, ["oddity"])
    assert declare(odd, ["oddity", "odd"]).spec == spec_of(
        "LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0}
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_unknown_key_that_is_null_means_what_its_absence_means(architecture: str) -> None:
    nothing = {"surprise": None, "quantization_config": {"quant_method": "fp8", "surprise": None}}
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0, "surprise": None}}
    spec = spec_of(architecture, **nothing, **scaling)
    assert spec == spec_of(architecture, rope_scaling={"type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("Qwen2ForCausalLM", {"use_mrope": False}),  # Qwen2.5-7B
        ("Qwen2ForCausalLM", {"rotary_emb_base": 10000, "seq_length": 512}),  # CodeQwen1.5-7B-Chat
        ("Glm4MoeForCausalLM", {"moe_router_dtype": "float32"}),  # GLM-4.7-FP8
        ("Ernie4_5_MoeForCausalLM", {"_attn_implementation": "eager"}),  # as ERNIE's own exporter writes it
        ("Qwen3MoeForCausalLM", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ],
)
def test_redundant_keys_of_other_models_are_accepted(architecture: str, values: dict[str, Any]) -> None:
    assert spec_of(architecture, **values) == spec_of(architecture)


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        (None, None),
        ({"type": "default"}, None),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0, 512)),
        ({"rope_type": "linear", "factor": 4}, RopeScaling("linear", 4.0, 512)),
        ({"type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0, 512)),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            RopeScaling("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 512)),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "beta_slow": 0,
                "attention_factor": 1.5,
                "mscale": 0.7,
                "mscale_all_dim": 0.8,
                "truncate": False,
            },
            RopeScaling(
                "yarn",
                4.0,
                128,
                beta_fast=16.0,
                beta_slow=1.0,
                attention_factor=1.5,
                mscale=0.7,
                mscale_all_dim=0.8,
                truncate=False,
            ),
        ),
    ],
)
def test_both_spellings_of_rope(scaling: dict[str, Any] | None, want: RopeScaling | None) -> None:
    old = mixer_of("LlamaForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    new = mixer_of("LlamaForCausalLM", rope_parameters={"rope_theta": 5e5, **(scaling or {})})
    assert old.rope == new.rope
    assert (old.rope.base, old.rope.scaling) == (5e5, want)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_context(scaling: dict[str, Any], context: int) -> None:
    assert spec_of("LlamaForCausalLM", rope_scaling=scaling).max_positions == context


def test_top_level_original_positions_win() -> None:
    """transformers' standardize_rope_params has the same precedence."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    mixer = mixer_of("LlamaForCausalLM", rope_scaling=scaling, original_max_position_embeddings=256)
    assert mixer.rope.scaling == RopeScaling("yarn", 4.0, 256)


@pytest.mark.parametrize(
    ("architecture", "values", "windows"),
    [
        ("MixtralForCausalLM", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("MixtralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 1}, [None] * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            [None, 8, 8, 8],
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        (
            "Qwen2MoeForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 8, None, 8],
        ),
    ],
)
def test_windows(architecture: str, values: dict[str, Any], windows: list[int | None]) -> None:
    assert [block.mixer.window for block in spec_of(architecture, **values).blocks] == windows


@pytest.mark.parametrize(
    ("values", "full"),
    [
        ({}, [3]),
        ({"full_attention_interval": 2}, [1, 3]),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, [0]),
    ],
)
def test_layers_of_full_and_linear_attention(values: dict[str, Any], full: list[int]) -> None:
    blocks = spec_of("Qwen3NextForCausalLM", **values).blocks
    assert [i for i, block in enumerate(blocks) if isinstance(block.mixer, Attention)] == full
    assert {block.mixer for i, block in enumerate(blocks) if i not in full} == {GatedDeltaNet(64, 2, 4, 16, 32, 4)}


V3_ROUTER = Router("sigmoid", True, correction=True, scale=2.5, epsilon=1e-20)


@pytest.mark.parametrize(
    ("architecture", "values", "router"),
    [
        ("Glm4MoeForCausalLM", {}, V3_ROUTER),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 4}, V3_ROUTER),
        ("Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 2}, replace(V3_ROUTER, groups=ExpertGroups(4, 2, 2))),
        ("Dots1ForCausalLM", {"norm_topk_prob": False}, replace(V3_ROUTER, renormalise=False)),
        ("Dots1ForCausalLM", {"scoring_func": "noaux_tc", "topk_method": "noaux_tc"}, V3_ROUTER),
        ("MiniMaxM2ForCausalLM", {}, Router("sigmoid", True, correction=True)),
        ("Ernie4_5_MoeForCausalLM", {}, Router("softmax", True, correction=True, least=1e-12)),
        ("Qwen3MoeForCausalLM", {}, Router("softmax", True)),
    ],
)
def test_routers(architecture: str, values: dict[str, Any], router: Router) -> None:
    ffn = spec_of(architecture, **values).blocks[3].ffn
    assert isinstance(ffn, Moe)
    assert ffn.router == router


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Dots1ForCausalLM"])
def test_first_layers_are_dense_and_mtp_layers_are_ignored(architecture: str) -> None:
    declared = declare(config(architecture, first_k_dense_replace=2, n_shared_experts=2, num_nextn_predict_layers=1))
    assert [block.ffn for block in declared.spec.blocks[:2]] == [Mlp(64, 96)] * 2
    assert [ffn.shared for block in declared.spec.blocks[2:] if isinstance(ffn := block.ffn, Moe)] == [Mlp(64, 48)] * 2
    assert declared.names.why_ignored("model.layers.4.eh_proj.weight")
    assert not declared.names.why_ignored("model.layers.3.eh_proj.weight")
    assert not declare(config(architecture)).names.why_ignored("model.layers.4.eh_proj.weight")


def test_a_published_config_of_minimax_m2() -> None:
    """Keys of earlier MiniMax models, set to values that switch their features off."""
    published = {
        "attn_type_list": [1, 1, 1, 1], "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "head_dim": 16, "rotary_dim": 8, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid", "sliding_window": None, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "rope_theta": 5000000,
    }  # fmt: skip
    mixer = mixer_of("MiniMaxM2ForCausalLM", **published)
    assert (mixer.rope.dim, mixer.rope.base, mixer.qk_norm) == (8, 5e6, "full")


@pytest.mark.parametrize(
    ("values", "sparse"),
    [
        ({}, [1, 2, 3]),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": -1}, [2, 3]),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}, [1]),
    ],
)
def test_dense_layers_of_ernie(values: dict[str, Any], sparse: list[int]) -> None:
    spec = spec_of("Ernie4_5_MoeForCausalLM", **values)
    assert [i for i, block in enumerate(spec.blocks) if isinstance(block.ffn, Moe)] == sparse
    assert spec.tied
    assert spec.mixers[0].rope.interleaved
    assert not spec_of("Ernie4_5_MoeForCausalLM", tie_word_embeddings=False).tied


def test_windows_of_dots1() -> None:
    values = {"sliding_window": 8, "max_window_layers": 2}
    windows = [
        block.mixer.window
        for block in spec_of("Dots1ForCausalLM", **values).blocks
        if isinstance(block.mixer, Attention)
    ]
    assert windows == [None, None, 8, 8]


def test_gpt_oss_as_openai_publishes_it() -> None:
    """The keys of gpt-oss-120b's config.json."""
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"]
    spec = spec_of(
        "GptOssForCausalLM", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=64,
        hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=[kinds[i % 2] for i in range(36)], max_position_embeddings=131072, model_type="gpt_oss",
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=36, num_key_value_heads=8,
        num_local_experts=128, output_router_logits=False, quantization_config={
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"
        }, rms_norm_eps=1e-05, rope_scaling=rope, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128,
        swiglu_limit=7.0, tie_word_embeddings=False, use_cache=True, vocab_size=201088,
    )  # fmt: skip
    assert spec.num_params == pytest.approx(116.83e9, rel=1e-4)
    assert [mixer.window for mixer in spec.mixers] == [128, None] * 18
    first = spec.mixers[0]
    assert (first.sinks, first.qkv_bias, first.o_bias) == (True, True, True)
    assert first.rope.scaling == RopeScaling("yarn", 32.0, 4096, truncate=False)
    ffn = spec.blocks[0].ffn
    assert isinstance(ffn, Moe)
    assert (ffn.expert, ffn.router) == (
        Mlp(2880, 2880, True, Gating("clamped_swiglu", 7.0)), Router("softmax", True, linear_bias=True)
    )  # fmt: skip


@pytest.mark.parametrize(("values", "dim"), [({}, 4), ({"partial_rotary_factor": 0.5}, 8)])
def test_partial_rotary_factor(values: dict[str, Any], dim: int) -> None:
    assert mixer_of("Qwen3NextForCausalLM", **values).rope.dim == dim


@pytest.mark.parametrize(
    ("values", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, [1]),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_dense_layers_among_sparse_ones(architecture: str, values: dict[str, Any], sparse: list[int]) -> None:
    blocks = spec_of(architecture, **values).blocks
    assert [i for i, block in enumerate(blocks) if isinstance(block.ffn, Moe)] == sparse
    assert all(block.ffn == Mlp(64, 96) for block in blocks if isinstance(block.ffn, Mlp))


@pytest.mark.parametrize(
    ("architecture", "values", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("Glm4MoeForCausalLM", {"attention_bias": True}, (True, False, False)),
        ("Dots1ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(architecture: str, values: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    block = spec_of(architecture, **values).blocks[0]
    assert isinstance(block.ffn, Mlp)
    assert (block.mixer.qkv_bias, block.mixer.o_bias, block.ffn.bias) == biases
