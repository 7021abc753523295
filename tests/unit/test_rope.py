"""Rotary frequencies of every scaling against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from proa.engine.executors.angles import AngleTables
from proa.engine.executors.batch import StepLimits
from proa.errors import ConfigError
from proa.layers.rope import cos_sin
from proa.models.config_reader import Reader
from proa.models.rope_reader import context_tokens, rope
from proa.models.spec import Rope, RopeScaling

BASE = 5e5
CASES = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0, 64)),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, RopeScaling("dynamic", 3.0, 64)),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        RopeScaling("yarn", 4.0, 64),
    ),
    "yarn, all keys": (
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
         "attention_factor": 1.3, "original_max_position_embeddings": 64},
        RopeScaling("yarn", 40.0, 64, beta_fast=24.0, beta_slow=2.0, truncate=False, attention_factor=1.3),
    ),
    "yarn, mscale": (
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 64},
        RopeScaling("yarn", 40.0, 64, mscale=0.7, mscale_all_dim=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [10, 64, 200])
def test_angles_match_transformers(case: str, length: int) -> None:
    parameters, scaling = CASES[case]
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=64,
        rope_parameters={"rope_theta": BASE, **parameters},
    )  # fmt: skip
    positions = torch.arange(length)
    want = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    got = cos_sin(Rope(32, BASE, scaling), positions, torch.full((length,), length))
    for ours, theirs in zip(got, want, strict=True):
        half = theirs[0, :, : 32 // 2]
        # angles reach `length` radians in float32, so their cosines differ by up to its rounding there
        assert (ours - half).abs().max() <= 4 * length * torch.finfo(torch.float32).eps


def test_a_null_factor_of_yarn_is_how_far_the_context_was_extended() -> None:
    parameters = {"rope_theta": BASE, "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=384, rope_parameters=parameters)
    positions = torch.arange(300)
    want = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    reader = Reader({"max_position_embeddings": 384, "rope_parameters": parameters})
    read = rope(reader, 32, BASE)
    assert (read.scaling, context_tokens(reader, read)) == (RopeScaling("yarn", 6.0, 64), 384)
    for ours, theirs in zip(cos_sin(read, positions, positions + 1), want, strict=True):
        assert (ours - theirs[0, :, :16]).abs().max() <= 4 * 300 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("original", "message"), [(None, "'factor' is missing"), (768, "at least 1"), (0, "at least 1")]
)
def test_null_factors_that_say_nothing(original: int | None, message: str) -> None:
    parameters = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": original}
    with pytest.raises(ConfigError, match=message):
        rope(Reader({"max_position_embeddings": 384, "rope_parameters": parameters}), 32, BASE)


def test_a_dynamic_row_does_not_depend_on_its_chunk() -> None:
    dynamic = Rope(32, BASE, RopeScaling("dynamic", 3.0, 64))
    positions, lengths = torch.arange(100), torch.full((100,), 100)
    whole = cos_sin(dynamic, positions, lengths)
    parts = [cos_sin(dynamic, positions[a : a + 7], lengths[a : a + 7]) for a in range(0, 100, 7)]
    assert all(torch.equal(w, torch.cat([p[i] for p in parts])) for i, w in enumerate(whole))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_positions_along_three_axes(family: str) -> None:
    """M-RoPE: each frequency has its own axis, in sections (Qwen2-VL) or in turns (Qwen3-VL)."""
    sections, half = [4, 6, 6], 16
    rope_parameters = {"rope_type": "default", "mrope_section": sections, "rope_theta": BASE, "mrope_interleaved": True}
    made = {"head_dim": 2 * half, "hidden_size": 64, "num_attention_heads": 2, "rope_parameters": rope_parameters}
    if family == "qwen2_vl":
        theirs = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**made))
        axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    else:
        theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**made))
        axes = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(half))
    positions = torch.randint(0, 64, (3, 9))
    cos, sin = theirs(torch.zeros(1, 9, 64), positions[:, None])
    axial = Rope(2 * half, BASE, axes=axes)
    for want, got in zip((cos, sin), cos_sin(axial, positions, positions[0] + 1), strict=True):
        assert torch.equal(want[0, :, :half], got)
    limits = StepLimits(rows=9, sequences=1, context_tokens=64, page_tokens=16, head_rows=1)
    table = AngleTables([axial, Rope(2 * half, BASE)], limits, torch.device("cpu"))
    found = table.of(positions)
    assert torch.equal(found[axial][0], cos[0, :, :half])
    assert torch.equal(found[axial][1], sin[0, :, :half])
    assert torch.equal(found[Rope(2 * half, BASE)][0], table.of(positions[0])[Rope(2 * half, BASE)][0])


def test_axes_fit_the_frequencies() -> None:
    for wrong in ({"axes": (0, 1)}, {"axes": (0,) * 8, "scaling": RopeScaling("dynamic", 2.0, 64)}):
        with pytest.raises(ValueError, match="axes"):
            Rope(16, **wrong)
