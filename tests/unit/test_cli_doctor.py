"""`proa doctor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proa.cli.checks import disk, gpus, package_state, port
from proa.machine.machine import Gpu, Machine

PROGRAM = (
    "import sys; {before}; from proa.cli.main import main; sys.argv = ['proa', 'doctor', *{argv}]; sys.exit(main())"
)


def doctor(*argv: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(before=before, argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_json() -> None:
    done = doctor("--json")
    content = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in content["findings"]}
    assert content["healthy"] is (done.returncode == 0)
    assert findings["computing"]["status"] == "ok"
    assert findings["RAM speed"]["status"] in ("ok", "note"), "a note where other programs run"
    assert "GB/s" in findings["RAM speed"]["detail"]
    assert "pages" in findings["RAM speed"]["detail"]
    assert "native" in findings["computing"]["detail"]
    assert "kernels" in findings["computing"]["detail"]
    assert content["machine"]["total_bytes"] > 0
    for finding in content["findings"]:
        assert finding["status"] == "ok" or finding["remedy"] or finding["name"] == "CPU"
    assert findings["GPU"]["detail"]


def test_a_broken_torch_is_a_finding() -> None:
    done = doctor(before="sys.modules['torch'] = None")
    assert done.returncode == 1
    assert "torch cannot be loaded" in done.stdout
    assert "Install torch again" in done.stdout
    assert done.stderr == ""


def test_an_unknown_instruction_set_is_a_finding() -> None:
    done = doctor(before="import os; os.environ['PROA_ISA'] = 'sse9'")
    assert done.returncode == 1
    assert "no kernels named sse9" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_a_missing_native_library_is_a_finding() -> None:
    nowhere = "import proa.native.library as n; from pathlib import Path; n.PATH = Path('/nowhere/lib.so')"
    done = doctor("--json", before=nowhere)
    assert done.returncode == 1
    assert done.stderr == ""
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["RAM speed"]["status"] == "note"
    assert "not measured: Proa's native library is missing" in findings["RAM speed"]["detail"]
    assert findings["computing"]["status"] == "broken"


def test_folders(tmp_path: Path) -> None:
    assert disk("cache", tmp_path / "not" / "yet").status in ("ok", "note")
    (tmp_path / "file").write_text("")
    finding = disk("cache", tmp_path / "file" / "below")
    assert finding.status == "broken"
    assert "cannot be written" in finding.detail


def test_a_folder_that_this_user_may_not_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may look into all folders, so the refusal is simulated."""
    stat, below = os.stat, tmp_path / "theirs" / "proa"

    def refused(path: Any, **more: Any) -> os.stat_result:
        if str(path) == str(below):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refused)
    assert disk("cache", below).name == "cache folder"


def test_no_home_folder_is_a_finding() -> None:
    unset = "[os.environ.pop(name, '') for name in ('HOME', 'PROA_CACHE', 'XDG_CACHE_HOME')]"
    done = doctor("--json", before=f"import os, pwd; pwd.getpwuid = dict().__getitem__; {unset}")
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["cache folder"]["status"] == "broken"
    assert "this user has no home folder" in findings["cache folder"]["detail"]
    assert findings["computing"]["status"] == "ok", "the checks after it are made too"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert port("127.0.0.1", number).status == "note"
    assert port("127.0.0.1", number).status == "ok"


@pytest.mark.parametrize(
    ("requirement", "installed", "expected"),
    [
        ("torch>=2.11", "2.13.0+cpu", ("torch", "2.13.0+cpu", "")),
        ("torch>=2.11", "2.9.1", ("torch", "2.9.1", "torch 2.9.1 is older than 2.11")),
        ("pyyaml>=6", "6.0.3", ("pyyaml", "6.0.3", "")),
        ("prometheus-client>=0.21", None, ("prometheus-client", "missing", "prometheus-client is not installed")),
        ("huggingface_hub >= 1.0", "1.0", ("huggingface_hub", "1.0", "")),
        ("rich", "15", ("rich", "15", "")),
    ],
)
def test_package_states(
    requirement: str, installed: str | None, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proa.cli.checks._installed", lambda name: installed)
    assert package_state(requirement) == expected


CARD = Gpu(
    index=1, name="NVIDIA H200", total_bytes=140 << 30, free_bytes=139 << 30, capability=(9, 0), pcie_generation=5,
    pcie_width=16, pcie_bytes_per_s=63e9, memory_bytes_per_s=4.9e12, numa_node=1, driver="570.1",
)  # fmt: skip
BOX = Machine(cpu="Test", online_cpus=1, usable_cpus=(0,), total_bytes=1, available_bytes=1, torch_cuda="12.8")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, [("ok", "no GPU, for a test: the CPU computes")]),
        ({"gpus": (CARD,), "gpus_note": ""}, [("ok", "usable, torch is built with CUDA 12.8")]),
        ({"gpus": (CARD,)}, [("note", "no GPU, for a test"), ("ok", "usable")]),
        (
            {"gpus": (CARD,), "gpus_note": "", "torch_cuda": None},
            [("note", "torch is built without CUDA")],
        ),
        (
            {"gpus": (msgspec.structs.replace(CARD, capability=(7, 5)),), "gpus_note": ""},
            [("note", "best effort: no matrix instructions for bfloat16")],
        ),
        (
            {"gpus": (msgspec.structs.replace(CARD, capability=(6, 1)),), "gpus_note": ""},
            [("note", "not usable: compute capability 6.1 is below 7.5")],
        ),
    ],
)
def test_gpus(changes: dict[str, Any], told: list[tuple[str, str]]) -> None:
    found = list(gpus(msgspec.structs.replace(BOX, **{"gpus_note": "no GPU, for a test", **changes})))
    assert [finding.status for finding in found] == [status for status, _ in told]
    for finding, (_, expected) in zip(found, told, strict=True):
        assert expected in finding.detail
    assert all(finding.remedy for finding in found if finding.status == "note")


def test_a_gpu_is_described() -> None:
    (finding,) = gpus(msgspec.structs.replace(BOX, gpus=(CARD,)))
    for part in (
        "1: NVIDIA H200", "139 GiB of 140 GiB free", "compute capability 9.0", "PCIe 5.0 x16 (63.0 GB/s)",
        "memory 4900 GB/s by its data sheet", "NUMA node 1", "driver 570.1",
    ):  # fmt: skip
        assert part in finding.detail
