"""The reference's own dequantisation, against the exact values that tests/tiny_quantised.py writes, bit for bit, and
against the loader on GGUF files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from proa.check.truth import Truth
from proa.errors import WeightsError
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve
from tiny import make_tiny
from tiny_gguf import SAID, make_tiny_gguf
from tiny_quantised import DECODED, OTHER_NAMES, SCHEMES, make_quantised
from weights_cases import load

READ = SCHEMES | DECODED | OTHER_NAMES


@pytest.mark.parametrize("name", READ)
def test_values_are_the_formats(name: str, tmp_path: Path) -> None:
    folder, values = make_quantised(READ[name], "qwen3-moe", tmp_path / "m", moe_intermediate_size=96)
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    truth, sources = Truth(checkpoint, declared), resolve(declared, checkpoint.tensors).params
    for parameter, shape in declared.spec.params():
        want = values[sources[parameter].tensor].reshape(shape)
        np.testing.assert_allclose(truth.read(parameter).numpy(), want, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss", "deepseek-v3", "ernie", "mixtral"])
@pytest.mark.parametrize("form", ["safetensors", "F32", "Q8_0"])
def test_the_loader_reads_the_same(name: str, form: str, tmp_path: Path) -> None:
    """Stacked, transposed, alternating and changed tensors; blocks of GGUF."""
    if form == "safetensors" or name not in SAID:
        path = make_tiny(name, tmp_path / "m")
    else:
        path = make_tiny_gguf(name, tmp_path / "m.gguf", form, **SAID[name])
    checkpoint = open_checkpoint(path)
    truth = Truth(checkpoint, checkpoint.declare())
    for parameter, tensor in load(path).items():
        torch.testing.assert_close(truth.read(parameter), tensor, rtol=2.0**-22, atol=0)


def test_rows_of_the_embedding(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny("qwen3-moe", tmp_path))
    truth = Truth(checkpoint, checkpoint.declare())
    assert torch.equal(truth.rows("embed.weight", 7, 3), truth.read("embed.weight")[7:10])


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    checkpoint = open_checkpoint(folder)
    truth = Truth(checkpoint, checkpoint.declare())
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4096)
    names = [name for name, _ in checkpoint.declare().spec.params()]
    with pytest.raises(WeightsError, match="ends too early: "):
        [truth.read(name) for name in names]
