"""benchmarks/peers: what can go wrong without the other programs there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo_model import demo_gguf, demo_moe
from weights_cases import load

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


def test_whole_models_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    script = [sys.executable, str(PEERS / "run_llama_files.py"), "--models", "demo-dense"]
    done = subprocess.run(script, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "llama-cpp-python cannot be used here" in done.stderr
    assert "README.md" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("peers")
def test_ratios_are_of_rounds() -> None:
    from run_llama_files import Answer, Options, Side, _cell

    sides = Side(100), Side(100)
    for ours_s, theirs_s in ((1.0, 2.0), (2.0, 8.0), (4.0, 4.0)):
        sides[0].answers.append(Answer([1, 2, 3], ours_s, 2 * ours_s))
        sides[1].answers.append(Answer([1, 2, 3], theirs_s, 4 * theirs_s))
    cell = _cell("m", 2, Options(output_tokens=3), sides, (2, 0.5))
    assert (cell.proa_prefill_tokens_per_s, cell.llama_prefill_tokens_per_s) == (50, 25)
    assert (cell.proa_decode_tokens_per_s, cell.llama_decode_tokens_per_s) == (0.5, 0.125)
    assert (cell.prefill_ratios, cell.prefill_ratio) == ([2, 4, 1], 2)
    assert (cell.decode_ratios, cell.decode_ratio) == ([4, 8, 2], 4)
    assert (cell.equal_tokens, cell.logit_gap) == (2, 0.5)


@pytest.mark.seldom
@pytest.mark.demo
@pytest.mark.usefixtures("peers")
def test_the_moe_file_holds_the_demo(tmp_path: Path) -> None:
    """All weights are the demo's; experts' down projections are scaled for 16 experts instead of 12, and the router is
    not rounded."""
    from demo_moe_gguf import write_demo_moe

    def arrays(path: Path) -> dict[str, Any]:
        return {name: tensor.float().numpy() for name, tensor in load(path).items()}

    want, got = arrays(demo_moe()), arrays(write_demo_moe(demo_gguf(), tmp_path, "bf16"))
    head = got.pop("head.weight")
    np.testing.assert_array_equal(head, want["embed.weight"])
    assert got.keys() == want.keys()
    for name, values in want.items():
        if ".experts." in name and "down" in name:
            np.testing.assert_allclose(got[name], values * (16 / 12), rtol=2**-7)
        elif name.endswith("router.weight"):
            np.testing.assert_allclose(got[name], values, rtol=2**-8)
        else:
            np.testing.assert_array_equal(got[name], values)
