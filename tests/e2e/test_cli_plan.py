"""`proa plan`, run as by a user: for this machine, for a described one, and beside the server that it plans. Refusals
are of the command in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import programs
from e2e.serving import LIMIT_S, serving
from engine_forks import EngineForks
from fakes import make_tokenizer
from families.hub_texts import CONFIGS
from proa.cli.main import main
from proa.config.field import declarations
from proa.config.options import EngineOptions
from proa.machine.load import Load
from proa.machine.machine import Gpu, Machine
from proa.machine.machine_file import FORMAT, Kernels, MachineFile, machine_json, read_machine_file
from proa.machine.rates import GpuRate, RamRate, Rates
from tiny import make_tiny
from tiny_quantised import SCHEMES, make_quantised

TB = 1 << 40
Planned = Callable[..., dict[str, Any]]
VOCAB, HIDDEN = 512, 256


def proa(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(programs.proa(*argv), capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs `proa plan` in this process: its exit code, and what it prints on stderr; stdout must stay empty."""

    def run(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["proa", "plan", *argv])
        code, (out, err) = main(), capsys.readouterr()
        assert out == ""
        assert err.startswith("proa: ")
        assert "Traceback" not in err
        return code, err

    return run


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Runs `proa plan --json` in this process, whose imports are done; test_text runs the program."""

    def run(*argv: str) -> dict[str, Any]:
        capsys.readouterr()  # what libraries have printed before
        monkeypatch.setattr(sys, "argv", ["proa", "plan", *argv, "--json"])
        code, (out, err) = main(), capsys.readouterr()
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("qwen3-moe", tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB, hidden_size=HIDDEN)
    return make_tokenizer(folder, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def this_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("machine") / "machine.json"
    file.write_text(proa("doctor", "--json").stdout)
    return file


@pytest.fixture(scope="module")
def big_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a machine with an H200 and 2 TiB of RAM."""
    card = Gpu(index=0, name="NVIDIA H200", total_bytes=141 << 30, free_bytes=140 << 30, capability=(9, 0),
               memory_bytes_per_s=4.9e12, pcie_bytes_per_s=63e9)  # fmt: skip
    machine = Machine(cpu="Big", online_cpus=64, usable_cpus=tuple(range(64)), physical_cores=64, total_bytes=2 * TB,
                      available_bytes=2 * TB - (8 << 30), gpus=(card,), torch_cuda="12.8")  # fmt: skip
    rates = Rates(
        ram=RamRate(bytes_per_s=4e11, threads=64, pages=("shmem-huge",), load=Load(0.0, 64)), cpu_flops_per_s=5e13,
        gpus=(GpuRate(index=0, vram_bytes_per_s=4.4e12, pcie_bytes_per_s=5.5e10, flops_per_s=7e14),),
    )  # fmt: skip
    file = tmp_path_factory.mktemp("machine") / "big.json"
    file.write_text(machine_json(MachineFile(format=FORMAT, machine=machine, kernels=Kernels("amx"), rates=rates)))
    return file


def decided(report: dict[str, Any]) -> dict[str, str]:
    """What was decided, by name, without the RAM and its speed, which change between two starts."""
    return {row["name"]: row["got"] for row in report["decisions"] if row["name"] not in ("RAM speed", "RAM")}


def packed_bytes(report: dict[str, Any]) -> int:
    """Planned weights without the embedding, which the engine does not count among packed weights."""
    planned: int = report["memory"]["weights_bytes"]
    return planned - 2 * VOCAB * HIDDEN


def published(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


def test_doctor_describes_this_machine_for_a_plan(this_machine: Path, folder: Path, plan: Planned) -> None:
    described = read_machine_file(this_machine)
    assert described.rates.ram.bytes_per_s > 1e8
    assert described.rates.cpu_flops_per_s > 1e8
    found = plan(str(folder), "--machine", str(this_machine), "--dtype=bfloat16")
    assert found["machine"] == json.loads(this_machine.read_bytes())["machine"]
    assert found["machine_file"] == str(this_machine)
    assert found["predictions"]["speeds"]["ram"]["per_s"] == described.rates.ram.bytes_per_s
    assert found["roof"]["bandwidth_bytes_per_s"] == described.rates.ram.bytes_per_s
    assert found["memory"]["free_bytes"] == described.machine.available_bytes


def test_the_plan_is_that_of_the_server_and_the_memory_what_it_takes(
    folder: Path, plan: Planned, engine_forks: EngineForks | None
) -> None:
    asked = ("--context=256", "--max-running=3", "--ram=3GiB", "--gpu=none", "--dtype=bfloat16")
    found = plan(str(folder), *asked)
    with serving(folder, *asked, forks=engine_forks) as (_, served):
        assert httpx.get(served["url"] + "/health", trust_env=False).status_code == 200
    for key in ("model", "context_tokens", "max_running", "gpus"):
        assert found[key] == served[key], key
    assert found["options"] == [option for option in served["options"] if option["name"] != "port"]
    same = {name for name in found["memory"] if name not in ("free_bytes", "reserve_bytes")}
    assert {name: found["memory"][name] for name in same} == {name: served["memory"][name] for name in same}
    assert decided(found) == decided(served)
    assert packed_bytes(found) == pytest.approx(served["ready"]["weights_bytes"], rel=0.01)
    assert sum(node["weights_bytes"] for node in found["nodes"]) == found["memory"]["weights_bytes"]


@pytest.mark.seldom
@pytest.mark.parametrize("scheme", ["fp8 block", "int4", "gptq", "nvfp4"])
def test_memory_by_the_config_alone_is_what_the_server_takes(
    scheme: str, tmp_path: Path, plan: Planned, engine_forks: EngineForks | None
) -> None:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 256}
    folder, _ = make_quantised(SCHEMES[scheme], "qwen3-moe", tmp_path / "m", vocab_size=VOCAB, **sizes)
    make_tokenizer(folder, vocab_size=VOCAB)
    text = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(text))
    with serving(folder, "--context=128", "--gpu=none", forks=engine_forks) as (_, served):
        pass
    (folder / "model.safetensors").unlink()
    found = plan(str(folder), "--context=128", "--gpu=none")
    assert found["model"]["format"] == "config"
    assert packed_bytes(found) == pytest.approx(served["ready"]["weights_bytes"], rel=0.01)
    assert found["memory"]["kv_bytes"] == served["memory"]["kv_bytes"]
    assert proa("serve", str(folder)).returncode == 3, "only a plan needs no weights"


def test_a_machine_that_is_not_here(big_machine: Path, tmp_path: Path, plan: Planned) -> None:
    found = plan(str(published(tmp_path, "deepseek-ai/DeepSeek-V3")), "--machine", str(big_machine))
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["gpu_only"], gpu["inclusive"]) == ("NVIDIA H200", False, True)
    assert found["memory"]["weights_bytes"] > 600 << 30
    assert found["longest_prompt_tokens"] == found["context_tokens"] - 1
    for of in (found["predictions"]["decode"], found["predictions"]["prefill"]):
        assert [row["tokens"] for row in of if row["requests"] == 1] == [512, 8192, 32768]
        assert all(0 < row["tokens_per_s"] < row["limit_tokens_per_s"] for row in of)
    speeds = found["predictions"]["speeds"]
    assert {name: speed["per_s"] for name, speed in speeds.items()} == {
        "ram": 4e11, "cpu": 5e13, "vram": 4.4e12, "pcie": 5.5e10, "gpu": 7e14,
    }  # fmt: skip
    assert found["predictions"]["decode"][0]["bound_by"] == "RAM bandwidth"
    compute = next(row for row in found["decisions"] if row["name"] == "computing")
    assert compute["got"] == "cuda:0, native amx for experts in RAM"


@pytest.mark.alone
def test_a_trillion_parameters_in_seconds(big_machine: Path, tmp_path: Path) -> None:
    folder = published(tmp_path, "moonshotai/Kimi-K2-Instruct")
    begin_s = time.perf_counter()
    found = json.loads(proa("plan", str(folder), "--machine", str(big_machine), "--json").stdout)
    assert time.perf_counter() - begin_s < 5
    assert found["model"]["parameters"] > 1e12
    assert 0 < found["seconds"] < 5


def test_text(big_machine: Path, tmp_path: Path) -> None:
    done = proa("plan", str(published(tmp_path, "deepseek-ai/DeepSeek-V3")), "--machine", str(big_machine))
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for part in (
        "fits. NVIDIA H200 holds everything but routed experts, and", "RAM holds all of them, 6",
        "A prompt may have", "One request decodes", "limited mostly by RAM bandwidth", "tokens/s", "PCIe speed",
        "GPU products 700 TFLOP/s (measured, a bfloat16 product)", "by config.json alone", "experts in VRAM",
    ):  # fmt: skip
        assert part in text, part


def test_every_engine_option_is_accepted() -> None:
    text = proa("plan", "--help-all").stdout
    for option in declarations(EngineOptions).values():
        assert option.flag in text or f"--no-{option.flag[2:]}" in text


@pytest.mark.parametrize(
    ("name", "flags", "code", "message"),
    [
        ("moonshotai/Kimi-K2-Instruct", ("--ram=512GiB",), 4, "does not fit into VRAM and RAM together"),
        ("moonshotai/Kimi-K2-Instruct", ("--gpu=none", "--ram=512GiB"), 4, r"use --ram 98\d\d\d\dM"),
        ("moonshotai/Kimi-K2-Instruct", ("--vram=8GiB", "--gpu=0"), 4, "Use --vram"),
        ("moonshotai/Kimi-K2-Instruct", ("--context=999999",), 2, "longer than the 131072 tokens"),
        ("moonshotai/Kimi-K2-Instruct", ("--gpu-experts=300",), 4, "The requested experts take"),
        ("moonshotai/Kimi-K2-Instruct", ("--gpu=3",), 2, "there is no such GPU"),
    ],
)
def test_what_cannot_fit_is_refused(
    name: str, flags: tuple[str, ...], code: int, message: str, big_machine: Path, tmp_path: Path,
    refused: Callable[..., tuple[int, str]],
) -> None:  # fmt: skip
    found, text = refused(str(published(tmp_path, name)), "--machine", str(big_machine), *flags)
    assert found == code
    assert re.search(message, text, re.IGNORECASE), text


def test_bad_input_is_refused(big_machine: Path, tmp_path: Path, refused: Callable[..., tuple[int, str]]) -> None:
    content = json.loads(big_machine.read_bytes())
    content["machine"]["ram_gb"] = 64
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(content))
    model = tmp_path / "model"
    model.mkdir()
    cases = {
        (str(published(model, "moonshotai/Kimi-K2-Instruct")), str(wrong)): (2, "unknown field `ram_gb`"),
        (str(model), str(tmp_path / "none.json")): (2, "cannot be read"),
        (str(tmp_path) + "/", str(big_machine)): (3, "has no config.json"),
    }
    for (folder, machine), (code, message) in cases.items():
        found, text = refused(folder, "--machine", machine)
        assert found == code
        assert message in text
    config = CONFIGS["moonshotai/Kimi-K2-Instruct"] | {"quantization_config": {"quant_method": "hqq"}}
    (model / "config.json").write_text(json.dumps(config))
    found, text = refused(str(model), "--machine", str(big_machine))
    assert found == 3
    assert "the quantisation 'hqq' is not implemented" in text
    assert "Proa loads fp8" in text
