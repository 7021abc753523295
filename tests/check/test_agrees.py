"""`proa check` says yes on correct engines: every family, quantised formats, GGUF, and sampled layers."""

from __future__ import annotations

from pathlib import Path

import pytest

import proa.check.compare
import proa.check.run
from check_runs import SIM, checked, found
from proa.check.drive import CACHED, DECODE, PROMPT
from proa.check.report import answer
from tiny import TINY, make_tiny
from tiny_gguf import SAID, make_tiny_gguf
from tiny_quantised import DECODED, SCHEMES, make_quantised

Patch = pytest.MonkeyPatch
PHASES = {PROMPT, DECODE, CACHED}


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("gpu", "only"), [("none", "CPU, a"), (SIM, "simulated GPU")])
def test_every_family(name: str, gpu: str, only: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=gpu, only=only)
    assert found(report) == []
    assert report.agrees
    phases = PHASES - {CACHED} if name == "llama-dynamic" else PHASES  # whose keys depend on the prompt's length
    assert all(path.worst.keys() == phases for path in report.observed)


@pytest.mark.parametrize("name", [*SCHEMES, *DECODED])
@pytest.mark.parametrize(("gpu", "only"), [("none", "CPU, avx2"), (SIM, "VRAM and RAM")])
def test_every_format(name: str, gpu: str, only: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder, _ = make_quantised((SCHEMES | DECODED)[name], "qwen3-moe", tmp_path / "m", moe_intermediate_size=96)
    report = checked(folder, monkeypatch, gpu=gpu, only=only)
    assert found(report) == []
    assert report.agrees


@pytest.mark.parametrize("name", ["gpt-oss", "ernie", "deepseek-v2", "qwen3-next", "llama2"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_gguf(name: str, quant: str, tmp_path: Path, monkeypatch: Patch) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf", quant, **SAID[name])
    report = checked(file, monkeypatch, gpu=SIM, only="simulated GPU")
    assert found(report) == []
    assert report.agrees


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_torch(dtype: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, dtype=dtype)
    assert report.agrees
    plain = f"CPU, plain torch in {dtype}"
    assert [path.name for path in report.observed] == [plain, f"{plain}, BF16 KV", f"{plain}, FP8 KV"]
    assert {path.name for path in report.skipped} == {"CPU, native kernels", "GPU"}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_sampled_layers(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Blocks of the file keep their own weights in the sampled model."""
    folder = make_tiny(name, tmp_path, num_hidden_layers=9)
    report = checked(folder, monkeypatch, only="CPU, avx2", most_bytes=1)
    assert report.agrees
    assert report.of_layers == 9
    assert {0, 8} <= set(report.layers)
    assert len(report.layers) < 9


@pytest.mark.parametrize("name", ["qwen3-moe", "smollm2"])
def test_a_head_in_parts(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proa.check.compare, "_HEAD_ROWS", 100)
    assert checked(make_tiny(name, tmp_path), monkeypatch, only="CPU, avx2").agrees


@pytest.mark.parametrize(
    ("paths_share", "said"), [(0.0, "no: no path could be checked"), (1e9, "no: there was no time to compare a layer")]
)
def test_out_of_time(paths_share: float, said: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proa.check.run, "LIMIT_S", 1e-6)
    monkeypatch.setattr(proa.check.run, "_PATHS_SHARE", paths_share)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert not report.agrees
    assert answer(report).startswith(said)


def test_no_mutation_moves_experts(tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts that move")
    assert [path.name for path in report.observed] == ["simulated GPU, experts that move"]
    assert report.agrees
