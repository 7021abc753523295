"""The demo's split data, its safetensors writer, and when its folder is rebuilt."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from proa.demo.assemble import assemble
from proa.demo.safetensors_writer import Pending, to_bfloat16_bits, write_safetensors
from proa.demo.split import load_split
from proa.errors import UsageError

LAYERS, WIDTH, HIDDEN, EXPERTS = 30, 1536, 576, 16


def test_split_deals_out_every_neuron_once() -> None:
    split = load_split()
    assert split.neurons.shape == (LAYERS, WIDTH)
    for layer in range(LAYERS):
        shared, experts = split.parts(layer, WIDTH // 2)
        assert [len(e) for e in experts] == [WIDTH // 2 // EXPERTS] * EXPERTS
        assert sorted(np.concatenate([shared, *experts]).tolist()) == list(range(WIDTH))


def test_split_routers_are_centred_and_in_float16s_range() -> None:
    router = load_split().router.astype(np.float32)
    assert router.shape == (LAYERS, EXPERTS, HIDDEN)
    assert np.isfinite(router).all()
    assert (np.abs(router.mean(axis=1)) < 2**-10 * np.abs(router).max(axis=1)).all()
    subnormal = np.abs(router) < np.finfo(np.float16).smallest_normal
    assert subnormal.mean() < 0.01


def test_split_is_small_and_says_what_it_was_made_of() -> None:
    path = files("proa.demo").joinpath("split.npz")
    assert len(path.read_bytes()) < 1_000_000
    with path.open("rb") as file, np.load(file) as data:
        made_from = json.loads(str(data["made_from"]))
    assert made_from.keys() == {"gguf", "calibration", "calibration_sha256", "python", "torch", "seed"}


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    ours = torch.from_numpy(to_bfloat16_bits(array).astype(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(array).to(torch.bfloat16))


def test_bfloat16_ties_go_to_even() -> None:
    array = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], dtype=np.float32)
    assert to_bfloat16_bits(array).tolist() == [0x3F80, 0x3F82, 0xBF80]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_writer_makes_files_that_safetensors_reads(tmp_path: Path, dtype: str) -> None:
    arrays = {"a.weight": np.eye(3, 5, dtype=np.float32), "b": np.arange(7, dtype=np.float32)[::-1]}
    path, sizes = tmp_path / "model.safetensors", []
    pending = [Pending(name, array.shape, lambda array=array: array) for name, array in arrays.items()]
    write_safetensors(path, pending, dtype, sizes.append)
    with safe_open(path, "pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert {str(t.dtype) for t in read.values()} == {f"torch.{dtype}"}
    assert all(np.array_equal(read[name].float().numpy(), array) for name, array in arrays.items())
    assert sum(sizes) == sum(t.nbytes for t in read.values())


def test_writer_refuses_another_shape_than_declared(tmp_path: Path) -> None:
    pending = [Pending("a", (2, 3), lambda: np.zeros((3, 2), np.float32))]
    with pytest.raises(ValueError, match=r"a has shape \(3, 2\), declared \(2, 3\)"):
        write_safetensors(tmp_path / "x", pending, "float32", lambda _: None)


@pytest.mark.parametrize("top_k", [0, 17])
def test_assemble_refuses_impossible_top_k(tmp_path: Path, top_k: int) -> None:
    with pytest.raises(UsageError, match=f"top_k is {top_k}"):
        assemble(tmp_path / "x.gguf", tmp_path / "moe", top_k)


def test_assemble_never_replaces_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="was not made by Proa"):
        assemble(tmp_path / "x.gguf", tmp_path / "moe")
    assert (tmp_path / "moe" / "precious.txt").read_text() == "mine"
