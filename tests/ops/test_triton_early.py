"""Kernels that are launched early touch nothing but weights before they wait: read off what the compiler made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, poisoned, rand
from proa.ops.triton import early, norm
from proa.ops.triton.linear import linear

ROOT = Path(__file__).parents[2]
COMPILE = """
import importlib, json, sys
sys.path[:0] = ["src", "tools"]
import check_kernels

found = {}
for module in check_kernels.modules_of_kernels():
    for v in vars(importlib.import_module(module)).get("variants", list)():
        name = f"{module.rsplit('.', 1)[-1]}.{v.kernel.__name__}"
        if v.kernel.__name__ == "_pair":
            name += " down" if v.constants["ACTIVATION"] is None else " up"
        if v.constants.get("EARLY") and name not in found:
            found[name] = check_kernels.compiled(v, 90).asm["ptx"]
print(json.dumps(found))
"""
ACCESS = re.compile(r"\b(?:ld|st|red|atom|cp\.async\S*)\.(?:\w+\.)*global\S*")
WEIGHTS_FIRST = {"norm._norm"}  # kernels that load weights before they wait, in one place


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """PTX for sm_90 of one variant of each early kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_nothing_but_weights_is_touched_before_the_wait(programs: dict[str, str]) -> None:
    assert len(programs) >= 17
    for name, ptx in programs.items():
        before, after = ptx.split("griddepcontrol.wait", 1)
        assert "griddepcontrol.wait" not in after, name
        assert ptx.count("griddepcontrol.launch_dependents") == 1, name
        touched = ACCESS.findall(before)
        assert all(t.startswith("ld") for t in touched), (name, touched)
        assert bool(touched) == (name in WEIGHTS_FIRST), (name, touched)
        assert "ret;" not in before, name  # a program that returns without waiting breaks the chain
        assert ACCESS.search(after), name


def test_linear_maps_fetch_their_weights_while_they_wait(programs: dict[str, str]) -> None:
    for name in ("linear._one", "heads._rotate_store"):
        assert "prefetch.global.L2" in programs[name].split("griddepcontrol.wait")[0], name


def test_gate_up_fetches_down_after_its_own_weights(programs: dict[str, str]) -> None:
    for name, fetches in (("experts_few._pair up", True), ("experts_few._pair down", False)):
        assert ("prefetch.global.L2" in programs[name].rsplit("cp.async.cg", 1)[1]) == fetches, name


def test_nothing_begins_while_the_cpu_works(programs: dict[str, str]) -> None:
    for name in ("bell._pull", "bell._wait"):
        waiting, answered = programs[name].split("ld.acquire.sys", 1)
        assert "launch_dependents" not in waiting, name
        assert "launch_dependents" in answered, name


def test_an_interpreter_launches_nothing_early() -> None:
    assert early.options(torch.device("cpu")) == {"EARLY": False}


@pytest.mark.gpu
def test_a_chain_of_early_kernels_is_a_chain(rng: torch.Generator, device: torch.device) -> None:
    """Each kernel reads what the one before wrote: of a thousand, replayed, every bit is that of one after another."""
    weight, scale = (rand(rng, 2048, 2048) / 64).to(device), torch.ones(2048, dtype=BF16, device=device)
    first = rand(rng, 1, 2048).to(device)
    rows = [poisoned(1, 2048).to(device) for _ in range(4)]

    def run(after_each: bool) -> Tensor:
        rows[0].copy_(first)
        for i in range(500):
            linear(rows[2 * i % 4], weight, None, rows[(2 * i + 1) % 4])
            norm.rms_norm(rows[(2 * i + 1) % 4], scale, 1e-6, rows[(2 * i + 2) % 4])
            if after_each:
                torch.cuda.synchronize()
        return rows[0].clone()

    want = run(after_each=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(after_each=False)
    for _ in range(5):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)
