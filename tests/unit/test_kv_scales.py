"""Scales of an FP8 KV cache in checkpoints, under every name that writers use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proa.errors import WeightsError
from proa.plan.kv_type import kv_type
from proa.weights.checkpoint import open_checkpoint
from proa.weights.kv_scale_names import has_kv_scales
from proa.weights.kv_scales import kv_scales
from proa.weights.sources import resolve
from tiny import make_tiny

ATTENTION = "model.layers.{}.self_attn."
NAMES = {
    "beside attention": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "older compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
    "one for both": ("kv_scale", "kv_scale"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3-moe", tmp_path_factory.mktemp("plain"))


def with_tensors(plain: Path, folder: Path, more: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((plain / "config.json").read_text())
    save_file(load_file(plain / "model.safetensors") | more, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_they_are_read(
    names: tuple[str, str], dtype: torch.dtype, shape: tuple[int, ...], plain: Path, tmp_path: Path
) -> None:
    """Scales of the second layer only."""
    values = torch.tensor([0.03, 1.7]).to(dtype)
    values[0] = values[1] if names[0] == names[1] else values[0]
    more = {ATTENTION.format(1) + name: value.view(shape).clone() for name, value in zip(names, values, strict=True)}
    checkpoint = open_checkpoint(with_tensors(plain, tmp_path / "m", more))
    declared = checkpoint.declare()
    resolve(declared, checkpoint.tensors)  # nothing is left over
    assert has_kv_scales(checkpoint, declared)
    assert kv_scales(checkpoint, declared) == ((1.0, 1.0), tuple(values.tolist()), (1.0, 1.0))
    assert "with the checkpoint's scales" in kv_type("fp8", "bfloat16", checkpoint, declared).row.why


def test_missing_scales_are_1(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    declared = checkpoint.declare()
    assert not has_kv_scales(checkpoint, declared)
    assert kv_scales(checkpoint, declared) == ((1.0, 1.0),) * 3
    assert "no scales" in kv_type("fp8", "bfloat16", checkpoint, declared).row.why


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(0.0), "a scale must be finite"),
        (torch.tensor(-1.0), "a scale must be finite"),
        (torch.tensor(torch.inf), "a scale must be finite"),
        (torch.ones(2), "one scale"),
    ],
)
def test_invalid_scales_are_refused(value: Tensor, message: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_tensors(plain, tmp_path / "m", {ATTENTION.format(0) + "k_scale": value}))
    with pytest.raises(WeightsError, match=message):
        kv_scales(checkpoint, checkpoint.declare())
