"""`proa check`: the table, the last line, exit codes; damaged checkpoints name the tensor. Yes and refusals are of the
program; other tests call the command in this process, which has imported torch already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gpu_llm import poison
from proa.cli import check as check_command
from proa.cli.main import main
from programs import proa
from tiny import make_tiny

GPUS = [pytest.param("sim:256MiB", id="sim"), pytest.param("0", id="cuda", marks=pytest.mark.gpu)]
DAMAGED = "model.layers.1.mlp.experts.3.down_proj.weight"


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = proa("check", str(folder), "--dtype", "bfloat16", *flags)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str


Check = Callable[..., Done]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs the command in this process."""
    monkeypatch.setattr(check_command, "child_environ", dict)  # this process keeps its environment

    def done(folder: Path, *flags: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["proa", "check", str(folder), "--dtype", "bfloat16", *flags])
        return Done(main(), capsys.readouterr().out)

    return done


@pytest.mark.seldom
@pytest.mark.parametrize("gpu", GPUS)
def test_yes(gpu: str, tmp_path: Path) -> None:
    done = run(make_tiny("qwen3-moe", tmp_path), "--gpu", gpu)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].endswith("all 3 layers, --seed 0")
    assert lines[-1].startswith("yes: ")
    table = [line for line in lines if line.endswith("yes")]
    assert any("GPU, experts in VRAM" in line for line in table)
    assert any(line.startswith("CPU, ") for line in table)


def test_no(check: Check, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    poison(folder, layer=1, expert=5)
    done = check(folder, "--gpu", "none", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["agrees"]
    first = report["paths"][0]["problems"][0]
    assert (first["layer"], first["op"], first["experts"]) == (1, "experts", "expert 5")
    assert first["over_bound"] == "infinite"


def test_the_last_line_says_no(check: Check, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    poison(folder, layer=1, expert=5)
    done = check(folder, "--gpu", "none")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("no: ")
    assert "layer 1, experts, expert 5: NaN or infinity in" in done.stdout


def with_nan(folder: Path, file: Path) -> None:
    tensors = load_file(file)
    tensors[DAMAGED][2, 7] = float("nan")
    save_file(tensors, file, {"format": "pt"})


def without_tensor(folder: Path, file: Path) -> None:
    tensors = load_file(file)
    del tensors[DAMAGED]
    save_file(tensors, file, {"format": "pt"})


def of_another_shape(folder: Path, file: Path) -> None:
    tensors = load_file(file)
    tensors[DAMAGED] = tensors[DAMAGED][:, :-1].contiguous()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("damage", [with_nan, without_tensor, of_another_shape])
def test_a_damaged_checkpoint_names_the_tensor(damage: object, check: Check, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    (file,) = folder.glob("*.safetensors")
    damage(folder, file)  # type: ignore[operator]
    done = check(folder, "--gpu", "none")
    assert done.returncode == 1
    assert done.stdout.startswith("no: ")
    assert DAMAGED in done.stdout


def test_a_file_that_is_cut_off(check: Check, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4096)
    done = check(folder, "--gpu", "none")
    assert done.returncode == 1
    assert done.stdout.startswith(f"no: {file}: the header describes ")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nosuch-model"], 3, "There is no model nosuch-model"),
        (["demo", "--load-format", "dummy"], 2, "--load-format dummy has none. Leave it out."),
    ],
)
def test_what_cannot_be_checked_is_refused_before_torch(argv: list[str], code: int, words: str) -> None:
    command = proa("check", *argv)
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    after = os.times()
    assert done.returncode == code
    assert done.stderr.startswith("proa: ")
    assert words in done.stderr
    assert done.stdout == ""
    assert after.children_user - before.children_user < 1.0, "torch takes several seconds of CPU time"


def test_no_answer_has_its_own_exit_code(check: Check, tmp_path: Path) -> None:
    """All paths take longer than a second, so the limit leaves some out."""
    done = check(make_tiny("qwen3-moe", tmp_path), "--gpu", "sim:256MiB", "--time-limit", "1")
    assert done.returncode == 7
    last = done.stdout.splitlines()[-1]
    assert last.startswith("no answer: the time limit left out ")
    assert "Give --time-limit 240" in last
    assert "not compared: " in done.stdout
