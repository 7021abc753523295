"""config.json files as they are published: every one must pass, and give the published model's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from proa.models.families import declare
from proa.models.spec import Attention, GatedDeltaNet, Model, Moe, Rope, RopeScaling

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub_configs.json").read_bytes())

# Name: (parameters, context in tokens, KV bytes per token in bfloat16).
NUMBERS = {
    "Llama-1-7B (first conversion)": (6_738_415_616, 2048, 524288),
    "Llama-2-7B": (6_738_415_616, 4096, 524288),
    "Llama-3.1-8B-Instruct": (8_030_261_248, 131072, 131072),
    "SmolLM2-135M-Instruct": (134_515_008, 8192, 23040),
    "Yi-1.5-34B": (34_388_917_248, 4096, 245760),
    "Qwen2.5-7B-Instruct": (7_615_616_512, 32768, 57344),
    "Qwen2.5-7B-Instruct with the YaRN its card recommends": (7_615_616_512, 131072, 57344),
    "Qwen3-8B": (8_190_735_360, 40960, 147456),
    "Qwen3-30B-A3B": (30_532_122_624, 40960, 98304),
    "Qwen2-57B-A14B": (57_408_658_944, 131072, 57344),
    "Qwen1.5-MoE-A2.7B": (14_315_784_192, 8192, 196608),
    "Mixtral-8x7B-v0.1": (46_702_792_704, 32768, 131072),
    "Mixtral-8x22B-v0.1": (140_620_634_112, 65536, 229376),
    "Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 262144, 24576),
}


def spec_of(name: str) -> Model:
    return declare(CONFIGS[name]).spec


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers(name: str) -> None:
    spec = spec_of(name)
    assert (spec.num_params, spec.max_positions, spec.kv_bytes_per_token(2)) == NUMBERS[name]


@pytest.mark.parametrize("name", [name for name in CONFIGS if "Llama-1" not in name])
def test_as_many_parameters_as_transformers(name: str) -> None:
    config = CONFIGS[name]
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(config)))
    assert spec_of(name).num_params == model.num_parameters()


def test_rope() -> None:
    assert spec_of("Llama-2-7B").attention[0].rope == Rope(128, 10000.0)
    assert spec_of("SmolLM2-135M-Instruct").attention[0].rope == Rope(64, 100000.0)
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert spec_of("Llama-3.1-8B-Instruct").attention[0].rope == Rope(128, 500000.0, scaling)
    yarn = spec_of("Qwen2.5-7B-Instruct with the YaRN its card recommends")
    assert yarn.attention[0].rope == Rope(128, 1000000.0, RopeScaling("yarn", 4.0, 32768))


def test_routers() -> None:
    found = {}
    for name in CONFIGS:
        ffn = spec_of(name).blocks[-1].ffn
        if isinstance(ffn, Moe):
            found[name] = (ffn.experts, ffn.top_k, ffn.width, ffn.router.renormalise, ffn.shared_gate)
    assert found == {
        "Qwen3-30B-A3B": (128, 8, 768, True, False),
        "Qwen2-57B-A14B": (64, 8, 2560, False, True),
        "Qwen1.5-MoE-A2.7B": (60, 4, 1408, False, True),
        "Mixtral-8x7B-v0.1": (8, 2, 14336, True, False),
        "Mixtral-8x22B-v0.1": (8, 2, 16384, True, False),
        "Qwen3-Next-80B-A3B-Instruct": (512, 10, 512, True, True),
    }


def test_no_published_model_slides() -> None:
    assert not [name for name in CONFIGS if any(mixer.window for mixer in spec_of(name).attention)]


def test_qwen3_next() -> None:
    spec = spec_of("Qwen3-Next-80B-A3B-Instruct")
    assert [isinstance(block.mixer, Attention) for block in spec.blocks] == [False, False, False, True] * 12
    assert spec.blocks[0].mixer == GatedDeltaNet(2048, 16, 32, 128, 128, 4)
    assert spec.ropes == {Rope(64, 1e7)}
    assert spec.state_bytes_per_sequence(2) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert (spec.norm_offset, spec.recurrent) == (1.0, True)
