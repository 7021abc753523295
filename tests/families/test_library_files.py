"""Files written by other libraries: each is read, and its values equal the library's own dequantised values.

The libraries are fetched, not installed, and write in a process of their own (tests/writers); without a network these
tests are skipped. Formats that are written by hand, and logits, are in test_quantised_logits.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engines import load_decoder
from fetched import kept, unpacked
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve, stored_types
from tiny import make_tiny

WRITERS = Path(__file__).parents[1] / "writers"
COMPRESSED_TENSORS = {
    "compressed-tensors==0.20.0": "fd18911b3fb818eb11976d2a19134a58b5262b265b375c8d4a6a7282e80b7513",
    "loguru==0.7.3": "31a33c10c8e1e10422bfd431aeb5d351c7cf7fa671e3c4df004162264b28220c",
}
MODELOPT = {"nvidia-modelopt==0.47.0": "db13e62d7efe4a1512e8b8c3f479e28d64022306f94a194f13234e7dca1d3120"}
AUTO_ROUND = {
    "auto-round==0.16.1": "4dcdef6a64247ee9585a47052ec2adfaa259a41b3ccbe32435ff8d4a9388998e",
    "py-cpuinfo==9.0.0": "859625bc251f64e21f077d099d4162689c762b5d6a4c3c97553d56241c9674d5",
}
# Types after loading, besides the unquantised ones. q_proj, k_proj and v_proj have 256 columns, o_proj 128, which is
# one group of 128.
COMPRESSED = {
    "W4A16": {"INT4 128 BF16", "INT4 channel BF16"},
    "W4A16_ASYM": {"UINT4 128", "UINT4 channel"},
    "W8A16": {"INT8 128", "INT8 channel"},
    "W4AFP8": {"INT8 128", "INT8 channel"},  # codes of 4 bits, each in a byte
    "W8A8": {"INT8 channel"},
    "FP8": {"FP8 tensor"},
    "FP8_DYNAMIC": {"FP8 channel"},
    "FP8_BLOCK": {"FP8 block 128"},
    "NVFP4A16": {"NVFP4"},
    "MXFP4A16": {"MXFP4"},
    "MXFP8A16": {"MXFP8"},
}
OPTIMISED = {
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": {"FP8 block 128"},
    "FP8_DEFAULT_CFG": {"FP8 tensor"},
    "MXFP4_DEFAULT_CFG": {"MXFP4"},
    "MXFP8_DEFAULT_CFG": {"MXFP8"},
    "NVFP4_DEFAULT_CFG": {"NVFP4"},
}
ROUNDED = {
    "auto_round+sym": {"INT4 32 F16", "INT8 32"},
    "auto_round+asym": {"UINT4 32", "INT8 32"},
    "auto_round:auto_gptq+asym": {"UINT4 32", "INT8 32"},
    "auto_round:auto_awq+sym": {"INT4 32 F16"},
    "auto_round:auto_awq+asym": {"UINT4 32"},
}


FINE_GRAINED = {"float": {"FP8 block 128"}, "ue8m0": {"FP8 block 128"}}


def written(
    folder: Path, writer: str, wheels: dict[str, str], names: list[str], without: str = "", head_dim: int = 32
) -> Path:
    """Checkpoints of one layer, a folder per name, kept for later runs: to import the libraries takes 30 s of CPU
    time. without: packages that the library does not need here."""
    paths = [str(unpacked(requirement, sha256)) for requirement, sha256 in wheels.items()]
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 384, "head_dim": head_dim}
    source = make_tiny("qwen3", folder / "source", **sizes)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def write(to: Path) -> None:
        command = [sys.executable, str(WRITERS / "without.py"), without, str(WRITERS / writer)]
        command += [str(source), str(to), *names]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    scripts = [(WRITERS / name).read_bytes() for name in (writer, "without.py")]
    versions = sys.version, torch.__version__, transformers.__version__
    weights = (source / "model.safetensors").read_bytes(), (source / "config.json").read_bytes()
    return kept(writer.removesuffix("_files.py"), repr((wheels, names, without, versions, scripts, weights)), write)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    return written(folder, "compressed_tensors_files.py", COMPRESSED_TENSORS, list(COMPRESSED))


@pytest.fixture(scope="module")
def optimised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimised")
    return written(folder, "modelopt_files.py", MODELOPT, list(OPTIMISED), "scipy,omegaconf,pulp")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    return written(folder, "auto_round_files.py", AUTO_ROUND, list(ROUNDED), "datasets")


@pytest.fixture(scope="module")
def fine_grained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine_grained")  # transformers converts what consists of whole blocks only
    return written(folder, "transformers_files.py", {}, list(FINE_GRAINED), head_dim=64)


def assert_read(folder: Path, kept: set[str]) -> None:
    """Compare with the library's own values; if those are bfloat16, they are the file's, rounded once."""
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    sources = resolve(declared, checkpoint.tensors)
    types = set(stored_types(sources, checkpoint.tensors).values())
    assert types - {"BF16", "F32"} == kept
    model = load_decoder(folder, torch.float32).decoder
    assert model is not None
    exact, seen = load_file(folder / "exact.safetensors"), 0
    for ours, tensor in dict(model.parameters()).items():
        want = exact.get(sources.params[ours].tensor)
        if want is None:
            continue
        seen += 1
        if want.dtype is torch.bfloat16:
            assert torch.equal(tensor.bfloat16(), want.view_as(tensor)), ours
        else:
            torch.testing.assert_close(tensor, want.float().view_as(tensor), rtol=2.0**-22, atol=0)
    assert seen >= 6


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name: str, compressed: Path) -> None:
    assert_read(compressed / name, COMPRESSED[name])


@pytest.mark.parametrize("name", OPTIMISED)
def test_modelopt(name: str, optimised: Path) -> None:
    assert_read(optimised / name, OPTIMISED[name])


@pytest.mark.parametrize("name", ROUNDED)
def test_auto_round(name: str, rounded: Path) -> None:
    folder = rounded / name.replace(":", "-")
    assert_read(next(folder.glob("**/config.json")).parent, ROUNDED[name])


@pytest.mark.skipif(
    "scale_fmt" not in signature(transformers.FineGrainedFP8Config).parameters,
    reason="this transformers has no FP8 with scales that are powers of two",
)
@pytest.mark.parametrize("name", FINE_GRAINED)
def test_transformers(name: str, fine_grained: Path) -> None:
    assert_read(fine_grained / name, FINE_GRAINED[name])
