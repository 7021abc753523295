"""The wheel of `make wheel`, installed as a user would: no compiler, no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 20 << 20


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("proa-*manylinux_2_28_x86_64.whl"))
    if not found:
        pytest.skip("there is no wheel in dist/: make wheel")
    return found[-1]


def test_it_is_small_and_has_the_library_and_the_demo(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "proa/native/libproa_native.so" in names
    assert "proa/demo/split.npz" in names
    assert not [name for name in names if name.startswith(("tests/", "csrc/"))]


@pytest.mark.timeout(1200)
def test_it_answers_without_a_compiler_and_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "PROA_", "XDG_", "HF_"))}
    environ |= {"HOME": os.environ["HOME"], "PATH": str(python.parent)}  # no compiler, no cmake
    # An unpinned torch would bring CUDA's libraries, several gigabytes, to a machine without a GPU.
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "torch<2.14", str(wheel)],
        env=environ, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip("the packages that Proa needs cannot be fetched: no network")
    assert done.returncode == 0, done.stderr
    question = ["chat", "demo", "-p", "What is the capital of France?", "--set", "temperature=0"]
    answer = subprocess.run(
        [python.parent / "proa", *question], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
