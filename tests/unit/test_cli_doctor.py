"""`proa doctor`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proa.cli.checks import disk, package_state, port

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
    assert findings["RAM speed"]["status"] == findings["computing"]["status"] == "ok"
    assert "GB/s" in findings["RAM speed"]["detail"]
    assert "native" in findings["computing"]["detail"]
    assert "kernels" in findings["computing"]["detail"]
    assert content["machine"]["total_bytes"] > 0
    for finding in content["findings"]:
        assert finding["status"] == "ok" or finding["remedy"] or finding["name"] == "CPU"


def test_a_broken_torch_is_found_and_told() -> None:
    done = doctor(before="sys.modules['torch'] = None")
    assert done.returncode == 1
    assert "torch cannot be loaded" in done.stdout
    assert "Install torch again" in done.stdout
    assert done.stderr == ""


def test_kernels_that_do_not_exist_are_told() -> None:
    done = doctor(before="import os; os.environ['PROA_ISA'] = 'sse9'")
    assert done.returncode == 1
    assert "no kernels named sse9" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_folders(tmp_path: Path) -> None:
    assert disk("cache", tmp_path / "not" / "yet").status in ("ok", "note")
    (tmp_path / "file").write_text("")
    finding = disk("cache", tmp_path / "file" / "below")
    assert finding.status == "broken"
    assert "cannot be written" in finding.detail


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
def test_package_states(requirement: str, installed: str | None, expected: tuple[str, str, str]) -> None:
    assert package_state(requirement, lambda name: installed) == expected
