"""GGUF files of every family: config, names and values, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny_gguf
from gguf_blocks import random_blocks
from proa.errors import ConfigError, WeightsError
from proa.models.gguf import config_from_metadata, generation_from_metadata
from proa.models.spec import RopeScaling
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve
from tiny import make_tiny, reference_params, tiny_reference
from tiny_gguf import SAID, interleaved, make_tiny_gguf
from tiny_quantised import make_gpt_oss
from weights_cases import assert_same, load


def stored(name: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """Parameters as the GGUF has them: q and k of the llama architecture interleaved, Qwen3-Next's numbers rounded."""
    model = tiny_reference(name, **overrides)
    params = reference_params(model)
    if model.config.model_type in ("llama", "mixtral"):
        heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
        for key, tensor in params.items():
            if key.endswith(("mixer.q.weight", "mixer.k.weight")):
                params[key] = torch.from_numpy(interleaved(tensor.numpy(), heads[key.split(".")[-2]]))
    if model.config.model_type == "qwen3_next":  # whose norms and decays are stored as other numbers
        for key, tensor in params.items():
            if "norm" in key and not key.endswith("mixer.norm.weight"):
                params[key] = (tensor + 1) - 1
            if key.endswith("a_log"):
                params[key] = torch.from_numpy(np.exp(tensor.numpy())).log()
    return params


@pytest.mark.parametrize("name", SAID)
def test_same_model_as_the_folder(name: str, tmp_path: Path) -> None:
    overrides = SAID[name]
    folder = make_tiny(name, tmp_path / "folder", **overrides)
    file = make_tiny_gguf(name, tmp_path / "m.gguf", **overrides)
    checkpoint = open_checkpoint(file)
    assert (checkpoint.load_format, checkpoint.dtype) == ("gguf", "bfloat16")
    assert checkpoint.path == file
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    want = open_checkpoint(folder).declare().spec
    got = checkpoint.declare().spec
    if name.startswith(("llama", "smollm", "mixtral")):
        rope = replace(want.blocks[0].mixer.rope, interleaved=True)
        want = replace(want, blocks=tuple(replace(b, mixer=replace(b.mixer, rope=rope)) for b in want.blocks))
    assert got.blocks == want.blocks
    assert list(got.params()) == list(want.params())
    assert (got.norm_eps, got.max_positions, got.tied) == (want.norm_eps, want.max_positions, want.tied)
    assert_same(load(file), stored(name, **overrides))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "qwen3-next"])
def test_files_of_older_converters(name: str, tmp_path: Path) -> None:
    """kv_b and qkvz as one tensor."""
    file, old = (make_tiny_gguf(name, tmp_path / f"{n}.gguf", old=n, **SAID[name]) for n in (False, True))
    checkpoints = [open_checkpoint(path) for path in (file, old)]
    assert checkpoints[0].tensors.keys() - checkpoints[1].tensors.keys()
    assert checkpoints[0].declare().spec == checkpoints[1].declare().spec
    assert_same(load(old), stored(name, **SAID[name]))


def test_a_file_with_both_forms_of_kv_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = list(tiny_gguf.gguf_tensors(tiny_reference("deepseek-v3"), "deepseek2", False))
    old = list(tiny_gguf.gguf_tensors(tiny_reference("deepseek-v3"), "deepseek2", True))
    both = dict(new) | dict(old)
    monkeypatch.setattr(tiny_gguf, "gguf_tensors", lambda *_: iter(both.items()))
    assert_same(load(make_tiny_gguf("deepseek-v3", tmp_path / "both.gguf")), stored("deepseek-v3"))
    monkeypatch.setattr(tiny_gguf, "gguf_tensors", lambda *_: iter([n for n in new if "attn_v_b" not in n[0]]))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_kv_b\.weight: not in the checkpoint"):
        load(make_tiny_gguf("deepseek-v3", tmp_path / "half.gguf"))


def test_mtp_layers_are_known_and_not_loaded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_gguf("glm4-moe", tmp_path / "m.gguf", num_nextn_predict_layers=1))
    declared = checkpoint.declare()
    assert len(declared.spec.blocks) == 3
    assert list(resolve(declared, checkpoint.tensors).ignored) == ["blk.3.nextn.eh_proj.weight"]


def test_the_file_says_whether_qwen2_moe_has_biases(tmp_path: Path) -> None:
    file = make_tiny_gguf("qwen2-moe", tmp_path / "m.gguf", qkv_bias=False)
    assert not [name for name, _ in open_checkpoint(file).declare().spec.params() if name.endswith(".bias")]
    assert_same(load(file), stored("qwen2-moe", qkv_bias=False))


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_values(quant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What the gguf package dequantises, rounded once to the target's type."""
    shapes = {"intermediate_size": 96, "moe_intermediate_size": 32}  # rows of whole blocks
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", quant, **shapes)
    kind = gguf.GGMLQuantizationType[quant]

    def through(name: str, values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 1 or "router" in name:
            return values.to(dtype)
        return torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind).copy()).to(dtype)

    want = {name: through(name, t) for name, t in stored("qwen3-moe", **shapes).items()}
    assert_same(load(file, dtype), want)


def copy_metadata(plain: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in plain.fields.items():
        if key.startswith(f"{writer.arch}."):
            writer.add_key_value(key, field.contents(), field.types[0])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mxfp4_blocks(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """uint8 [..., groups, 16], two neighbours a byte, and [..., groups] -> ggml's blocks: a scale, then bytes whose low
    nibbles are the first half."""
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    halves = values[..., :16] | values[..., 16:] << 4
    return torch.cat((scales[..., None], halves), -1).flatten(-2).contiguous().numpy()


def test_openais_blocks_as_the_converter_packs_them(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path / "folder", tmp_path / "plain")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    plain = gguf.GGUFReader(make_tiny_gguf("gpt-oss", tmp_path / "plain.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt-oss")
    copy_metadata(plain, writer)
    for tensor in plain.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight", tensor.name)
        if match is None:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        name = f"model.layers.{match[1]}.mlp.experts.{'down' if match[2] == 'down' else 'gate_up'}_proj"
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[match[2]]
        raw = mxfp4_blocks(*(stored[f"{name}_{part}"][:, rows] for part in ("blocks", "scales")))
        writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    finish(writer)
    got, want = load(tmp_path / "m.gguf", torch.bfloat16), load(tmp_path / "folder", torch.bfloat16)
    experts = [name for name in want if ".experts." in name and name.endswith("weight")]
    assert len(experts) == 4 * 8 * 3
    assert_same({name: got[name] for name in experts}, {name: want[name] for name in experts})


def test_parts_of_a_parameter_in_two_files(tmp_path: Path) -> None:
    """One tensor per file: q, k and v are separate from z, and keys from values."""
    for name in ("qwen3-next", "deepseek-v3"):
        make_tiny_gguf(name, tmp_path / name / "m.gguf", tensors_per_file=1)
        first = min((tmp_path / name).glob("*.gguf"))
        assert "-00001-of-" in first.name
        assert_same(load(first), stored(name))


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_types_that_the_package_cannot_make(quant: str, tmp_path: Path) -> None:
    """The blocks are random bytes with finite scales."""
    kind = gguf.GGMLQuantizationType[quant]
    file = make_tiny_gguf("qwen2", tmp_path / "plain.gguf", hidden_size=256, intermediate_size=512)
    plain = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    copy_metadata(plain, writer)
    rng = np.random.default_rng(1)
    want: dict[str, torch.Tensor] = {}
    for tensor in plain.tensors:
        if tensor.data.ndim == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        raw = random_blocks(quant, *tensor.data.shape, rng)
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
        want[tensor.name] = torch.from_numpy(gguf.dequantize(raw, kind))
    finish(writer)
    got = load(tmp_path / "m.gguf")
    assert torch.equal(got["embed.weight"], want["token_embd.weight"])
    assert torch.equal(got["blocks.2.ffn.down.weight"], want["blk.2.ffn_down.weight"])
    assert torch.equal(got["blocks.1.mixer.k.weight"], want["blk.1.attn_k.weight"])


def test_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1's scaling is in the file as a tensor, not as metadata."""
    factors = (1.0, 1.0, 1.5, 2.5, 4.0, 8.0, 8.0, 8.0)
    file = make_tiny_gguf("llama2", tmp_path / "m.gguf", rope_factors=factors)
    scaling = open_checkpoint(file).declare().spec.blocks[0].mixer.rope.scaling
    assert scaling == RopeScaling("factors", 1.0, 512, factors=factors)
    assert_same(load(file), stored("llama2"))


BASE: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (100, 64)}


def test_defaults() -> None:
    config = config_from_metadata(BASE, SHAPES)
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["vocab_size"] == 100
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_linear_scaling() -> None:
    scaled = BASE | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = config_from_metadata(scaled, SHAPES)["rope_parameters"]
    assert rope == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "'block_count' is missing"),
        ({"llama.attention.head_count_kv": [4, 2]}, "'attention.head_count_kv' must be"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not implemented"),
        ({"llama.attention.value_length": 8}, "attention.value_length = 8 is not implemented"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not implemented"),
        ({"llama.rope.scaling.attn_factor": 1.3}, "attn_factor = 1.3 is not implemented"),
    ],
)
def test_refused_metadata(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_metadata(BASE | metadata, SHAPES)


def test_unknown_key_is_left_for_declare(tmp_path: Path) -> None:
    file = make_tiny_gguf("llama2", tmp_path / "m.gguf")
    checkpoint = open_checkpoint(file, override_config={"llama.attention.clamp_kqv": 8.0})
    with pytest.raises(ConfigError, match=r"GGUF metadata.*--ignore-config-key llama.attention.clamp_kqv"):
        checkpoint.declare()
    checkpoint.declare(["llama.attention.clamp_kqv"])
    assert config_from_metadata(BASE | {"llama.attention.clamp_kqv": 8.0}, SHAPES)[
        "llama.attention.clamp_kqv"
    ] == pytest.approx(8.0)


def test_sampling_defaults() -> None:
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 5,
    }
    want = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 7]}
    assert generation_from_metadata(metadata) == want
    assert generation_from_metadata({}) == {}


DEEPSEEK: dict[str, Any] = {
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 2,
    "deepseek2.context_length": 512,
    "deepseek2.embedding_length": 64,
    "deepseek2.feed_forward_length": 96,
    "deepseek2.attention.head_count": 4,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
    "deepseek2.attention.kv_lora_rank": 32,
    "deepseek2.attention.key_length": 24,
    "deepseek2.attention.value_length": 16,
    "deepseek2.rope.dimension_count": 8,
    "deepseek2.expert_count": 256,
    "deepseek2.expert_used_count": 8,
    "deepseek2.expert_feed_forward_length": 24,
}


@pytest.mark.parametrize(("experts", "groups"), [(64, (1, 1)), (160, (8, 3)), (256, (8, 4)), (384, (1, 1))])
def test_groups_of_experts_where_the_file_has_no_key(experts: int, groups: tuple[int, int]) -> None:
    config = config_from_metadata(DEEPSEEK | {"deepseek2.expert_count": experts}, SHAPES)
    assert (config["n_group"], config["topk_group"]) == groups
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["topk_method"] == ("greedy" if groups == (1, 1) else "group_limited_greedy")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 100}, "expert_group_count is missing, and no published model has 100 experts"),
        ({"expert_gating_func": 3}, "expert_gating_func = 3 is not implemented"),
        ({"attention.head_count_kv": 2}, "head_count_kv = 2 is not implemented"),
        (
            {"attention.key_length_mla": 24, "attention.value_length_mla": 16},
            "key_length = 24 is not implemented, only 40",
        ),
    ],
)
def test_refused_metadata_of_deepseek(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_metadata(DEEPSEEK | {f"deepseek2.{key}": value for key, value in metadata.items()}, SHAPES)


def test_yarn_of_deepseek() -> None:
    scaled = {"type": "yarn", "factor": 40.0, "original_context_length": 128, "yarn_log_multiplier": 0.0707}
    config = config_from_metadata(DEEPSEEK | {f"deepseek2.rope.scaling.{k}": v for k, v in scaled.items()}, SHAPES)
    rope = config["rope_parameters"]
    assert (rope["mscale"], rope["mscale_all_dim"]) == (0.707, 0.707)


def test_a_growing_decay_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiny_gguf.np.exp", np.negative)  # ssm_a = A_log, of which some are above zero
    file = make_tiny_gguf("qwen3-next", tmp_path / "m.gguf")
    with pytest.raises(WeightsError, match=r"blk\.0\.ssm_a must be negative everywhere"):
        load(file)
