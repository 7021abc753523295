"""Tensors of quantised checkpoints -> matrices: what fits, what is refused, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.errors import ConfigError, WeightsError
from proa.models.quantisation import quantisation
from proa.weights.index import PLAIN_BYTES, TensorInfo
from proa.weights.quantised import collapse

W, SCALE, INV = "weight", "weight_scale", "weight_scale_inv"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(*size: int) -> dict[str, Any]:
    return {**FP8, "weight_block_size": list(size)}


def tensor(dtype: str, *shape: int) -> TensorInfo:
    nbytes = PLAIN_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return TensorInfo(dtype, shape, Path("m.safetensors"), 0, nbytes)


def collapsed(config: dict[str, Any], **tensors: TensorInfo) -> dict[str, TensorInfo]:
    of = quantisation({"quantization_config": config})
    assert of is not None
    return collapse({name.replace("__", "."): t for name, t in tensors.items()}, of)


@pytest.mark.parametrize(
    ("config", "tensors", "name", "shape"),
    [
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("BF16", 3, 2)}, "FP8 block 128", (300, 200)),
        (FP8, {W: ("F8_E4M3", 9, 20), INV: ("F32", 1, 1)}, "FP8 block 128", (9, 20)),
        (FP8, {W: ("F8_E4M3", 4, 256, 200), INV: ("F32", 4, 2, 2)}, "FP8 block 128", (4, 256, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), SCALE: ("F32", 300, 1)}, "FP8 channel", (300, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), SCALE: ("F32",)}, "FP8 tensor", (300, 200)),
    ],
)  # fmt: skip
def test_a_matrix(config: dict[str, Any], tensors: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    index = {f"a.b.{part}": tensor(*of) for part, of in tensors.items()}
    other = tensor("BF16", 16)
    of = quantisation({"quantization_config": config})
    assert of is not None
    got = collapse({**index, "a.b.bias": other, "a.norm.weight": other}, of)
    assert got.keys() == {"a.b.weight", "a.b.bias", "a.norm.weight"}
    matrix = got["a.b.weight"]
    assert (matrix.dtype, matrix.shape) == (name, shape)
    assert matrix.nbytes == sum(t.nbytes for t in index.values())


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        (FP8, {W: ("F8_E4M3", 300, 200)}, "has no scale"),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("F32", 2, 3)}, "does not fit"),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("I32", 3, 2)}, "does not fit"),
        (FP8, {W: ("F8_E4M3", 4, 256, 200), INV: ("F32", 3, 2, 2)}, "does not fit"),
        (blocks(8, 128), {W: ("F8_E4M3", 16, 128), INV: ("F32", 2, 1)}, "multiple of 16"),
        (blocks(128, 24), {W: ("F8_E4M3", 16, 48), INV: ("F32", 1, 2)}, "not implemented"),
        (FP8, {W: ("BF16", 16, 128)}, "no tensor is"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], tensors: dict[str, Any], problem: str) -> None:
    with pytest.raises(WeightsError, match=problem):
        collapsed(config, **{f"a__{part}": tensor(*of) for part, of in tensors.items()})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"activation_scheme": "other"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "two sizes"),
        ({"surprise": 1}, "--ignore-config-key surprise"),
    ],
)
def test_config_is_read_strictly(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        quantisation({"quantization_config": FP8 | change})


def test_a_key_may_be_ignored() -> None:
    assert quantisation({"quantization_config": FP8 | {"surprise": 1}}, ["surprise"])


def test_not_quantised() -> None:
    assert quantisation({"quantization_config": None}) is None
