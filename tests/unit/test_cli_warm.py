"""`proa warm`, run as a program: compiles kernels for a GPU that is not present, and compiles them only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proa.errors import UsageError
from proa.machine.absent import with_gpu
from proa.machine.probe import probe
from tiny import make_tiny

pytest.importorskip("triton")


def warm(cache: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proa.cli.main", "warm", *argv]
    environ = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    environ["PROA_CACHE"] = str(cache)
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("warm") / "tiny")


@pytest.mark.seldom
def test_a_second_run_has_nothing_to_do(tmp_path: Path, model: Path) -> None:
    asked = (str(model), "--dtype", "bfloat16", "--context", "256", "--arch", "sm_90", "--vram", "4GiB")
    first = warm(tmp_path, *asked, "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["arch"] == "sm_90"
    assert result["compiled"] == result["variants"] > 15
    assert (result["kept"], result["failed"]) == (0, [])
    folder = Path(result["folder"])
    assert folder.parent == tmp_path / "triton"
    assert len(list(folder.glob("*/*.cubin"))) == result["variants"]
    assert "compiling GPU kernels" in first.stderr
    second = warm(tmp_path, *asked)
    assert second.stdout == f"nothing to do: all {result['variants']} kernels for sm_90 are in {folder}\n"


def test_invalid_targets_are_refused(tmp_path: Path, model: Path) -> None:
    for argv, words in (
        (("--arch", "sm_90"), ["--arch sm_90 requires --vram"]),
        (("--arch", "sm_90", "--vram", "4GiB", "--gpu", "0"), ["excludes --gpu"]),
        (("--gpu", "none"), ["would use no GPU", "as asked", "--arch sm_90 --vram 80GiB"]),
    ):
        done = warm(tmp_path, str(model), "--dtype", "bfloat16", *argv)
        assert done.returncode == UsageError("").exit_code
        assert not done.stdout
        for word in words:
            assert word in done.stderr


def test_with_gpu_adds_an_absent_gpu() -> None:
    (gpu,) = with_gpu(probe(), "sm_120", 8 << 30).gpus
    assert (gpu.capability, gpu.free_bytes) == ((12, 0), 8 << 30)
    for wrong in ("90", "sm_9", "sm90", "gfx942"):
        with pytest.raises(UsageError, match="is not a GPU architecture"):
            with_gpu(probe(), wrong, 8 << 30)
