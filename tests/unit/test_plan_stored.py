"""Rows of the start-up table about quantised weights, and the plan's bytes for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.config.options import EngineOptions, GpuOptions, ModelOptions
from proa.plan.packed_size import packed_size
from proa.types import Decision
from proa.weights.sources import resolve, stored_types
from quick_plan import prepare
from tiny_quantised import DECODED, SCHEMES, make_quantised
from unit.loaded_weights import loaded

SIZES = {"moe_intermediate_size": 96}


def weights_row(folder: Path, dtype: str = "auto", gpu: str = "none") -> Decision:
    plan = prepare(str(folder), EngineOptions(model=ModelOptions(dtype=dtype), gpus=GpuOptions(gpu=gpu))).plan
    return next(row for row in plan.decisions if row.name == "weights")


def test_codes_are_kept(tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES["fp8 block"], "qwen3-moe", tmp_path / "m", **SIZES)
    row = weights_row(folder)
    assert row.got == "safetensors, FP8 block 128"
    assert row.why.startswith("codes and scales are kept unchanged; activations stay bfloat16 (made for FP8, dynamic)")


def test_dense_weights_are_bfloat16_with_a_simulated_gpu(tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES["fp8 block"], "qwen3-moe", tmp_path / "m", **SIZES)
    row = weights_row(folder, gpu="sim:64MiB")
    assert "codes and scales are kept unchanged; on a simulated GPU all but routed experts is bfloat16" in row.why


def test_dequantised_without_native_kernels(tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES["fp8 block"], "qwen3-moe", tmp_path / "m", **SIZES)
    assert weights_row(folder, "float32").why.startswith("dequantised while loading")


def test_mixed_stacks_are_named(tmp_path: Path) -> None:
    only = r"(?!.*layers\.1\.mlp\.experts\.3\.down).*"
    folder, _ = make_quantised(SCHEMES["fp8 block"], "qwen3-moe", tmp_path / "m", only=only, **SIZES)
    assert (
        "but blocks.1.ffn.experts.down become bfloat16: mixed types BF16 and FP8 block 128" in weights_row(folder).why
    )


def test_unsupported_codes_are_named(tmp_path: Path) -> None:
    folder, _ = make_quantised(DECODED["int8 zeros"], "qwen3-moe", tmp_path / "m", **SIZES)
    row = weights_row(folder)
    assert row.got == "safetensors, UINT8 32"
    assert "but UINT8 32 become bfloat16: no packed format supports them" in row.why


@pytest.mark.parametrize("name", SCHEMES)
def test_planned_bytes_equal_loaded_bytes(name: str, tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES[name], "qwen3-moe", tmp_path / "m", **SIZES)
    planned, active, took = loaded(folder)
    assert took == pytest.approx(planned, rel=0.25)  # one-dimensional weights
    assert 0 < active <= planned
    prepared = prepare(str(folder), EngineOptions(gpus=GpuOptions(gpu="none")))
    stored = stored_types(resolve(prepared.declared, prepared.checkpoint.tensors), prepared.checkpoint.tensors)
    assert prepared.plan.memory.weights_bytes == packed_size(prepared.declared.spec, stored).total_bytes == planned
