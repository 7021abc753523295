"""Which paths a machine has, and which layers of a large model are sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from proa.check.paths import Facts, NoPath, paths
from proa.check.paths import Path as OnePath
from proa.check.sample import sample
from proa.config.options import EngineOptions, ModelOptions
from proa.plan.opened import open_model
from tiny import make_tiny, tiny_spec

FACTS = Facts(("avx2", "scalar"), "", "no GPU was found", "bfloat16")


def names(facts: Facts, model: str) -> tuple[list[str], dict[str, str]]:
    """Paths, and those that there are not, with the reason."""
    found = paths(EngineOptions(), tiny_spec(model), facts)
    there = [path.name for path in found if isinstance(path, OnePath)]
    return there, {path.name: path.why for path in found if isinstance(path, NoPath)}


def test_cpu_alone() -> None:
    there, missing = names(FACTS, "qwen3-moe")
    assert there == ["CPU, avx2", "CPU, avx2, FP8 KV", "CPU, scalar"]
    assert missing == {
        "GPU": "no GPU was found",
        **{f"CPU, {isa}": "this CPU lacks it" for isa in ("amx", "avx512-bf16", "avx512")},
    }


def test_a_gpu_has_each_placement_and_kv_type() -> None:
    there, _ = names(replace(FACTS, gpu="GPU"), "qwen3-moe")
    assert there == [
        "GPU, experts in VRAM and RAM", "CPU, avx2", "GPU, prompts streamed and on CPU",
        "GPU, prompts streamed in groups and on CPU", "GPU, prompts streamed", "GPU, experts that move",
        "GPU, experts read over PCIe", "GPU, experts in VRAM", "GPU, experts in RAM",
        "GPU, experts in VRAM and RAM, FP8 KV", "CPU, avx2, FP8 KV",
        "CPU, scalar",
    ]  # fmt: skip


def test_models_without_routed_experts_or_without_kv_types() -> None:
    assert names(replace(FACTS, gpu="GPU"), "llama2")[0][:3] == ["GPU", "CPU, avx2", "GPU, FP8 KV"]
    there, missing = names(FACTS, "deepseek-v3")
    assert there == ["CPU, avx2", "CPU, scalar"]
    assert missing["CPU, avx2, FP8 KV"] == "its cache is kept in the type of activations"


def test_plain_torch_is_the_only_path_of_other_types() -> None:
    there, missing = names(replace(FACTS, dtype="float32", gpu="GPU"), "qwen3-moe")
    plain = "CPU, plain torch in float32"
    assert there == [plain, f"{plain}, BF16 KV", f"{plain}, FP8 KV"]
    assert missing.keys() == {"CPU, native kernels", "GPU"}


@pytest.mark.parametrize("seed", [1, 2])
def test_one_layer_of_each_kind_is_sampled(seed: int, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-next", tmp_path, num_hidden_layers=9)
    opened = open_model(folder, "auto", ModelOptions())
    spec = opened.declared.spec
    smallest = sample(opened, seed, most_bytes=1)
    assert {spec.blocks[i] for i in smallest.layers} == set(spec.blocks)
    assert {0, 8} <= set(smallest.layers)
    assert len(sample(opened, seed, most_bytes=1 << 40).layers) == len(opened.declared.spec.blocks)
    some = sample(opened, seed, most_bytes=500_000)
    assert set(smallest.layers) <= set(some.layers)
    assert some == sample(opened, seed, most_bytes=500_000)
    assert [spec.blocks[i] for i in some.layers] == list(some.opened.declared.spec.blocks)
