"""Rotary frequencies of every scaling against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from proa.layers.rope import cos_sin
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
    rope = Rope(32, BASE, scaling)
    got = cos_sin(rope, positions, torch.full((length,), length))
    for ours, theirs in zip(got, want, strict=True):
        half = theirs[0, :, : 32 // 2]
        # angles reach `length` radians in float32, so their cosines differ by up to its rounding there
        assert (ours - half).abs().max() <= 4 * length * torch.finfo(torch.float32).eps


def test_a_dynamic_row_does_not_depend_on_its_chunk() -> None:
    rope = Rope(32, BASE, RopeScaling("dynamic", 3.0, 64))
    positions, lengths = torch.arange(100), torch.full((100,), 100)
    whole = cos_sin(rope, positions, lengths)
    parts = [cos_sin(rope, positions[a : a + 7], lengths[a : a + 7]) for a in range(0, 100, 7)]
    assert all(torch.equal(w, torch.cat([p[i] for p in parts])) for i, w in enumerate(whole))
