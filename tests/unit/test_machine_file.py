"""The machine file: what `proa doctor --json` writes, read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.cli.checks import Examined, gpu_speed
from proa.errors import ResourceError, UsageError
from proa.machine.load import Load
from proa.machine.machine import Gpu, Machine, NumaNode
from proa.machine.machine_file import (
    FORMAT,
    ISAS,
    Described,
    Finding,
    Kernels,
    MachineFile,
    machine_json,
    parse_machine_file,
    read_machine_file,
)
from proa.machine.rates import GpuRate, RamRate, Rates
from quick_plan import ram_of

CARD = Gpu(index=0, name="Card", total_bytes=8 << 30, free_bytes=7 << 30, capability=(9, 0), pcie_bytes_per_s=63e9)
BOX = Machine(
    cpu="Test", online_cpus=2, usable_cpus=(0, 1), total_bytes=2 << 30, available_bytes=1 << 30, gpus=(CARD,),
    numa=(NumaNode(0, (0, 1), 2 << 30, 1 << 30, (10,)),),
)  # fmt: skip
RATES = Rates(
    ram=ram_of(),
    cpu_flops_per_s=5e11,
    gpus=(GpuRate(index=0, vram_bytes_per_s=3e12, pcie_bytes_per_s=5e10, flops_per_s=6e14),),
)
FILE = MachineFile(format=FORMAT, machine=BOX, kernels=Kernels("avx2", "no avx512"), rates=RATES)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
BYTES, RATE = st.integers(0, 1 << 50), st.floats(1e-3, 1e18)
CPUS = st.lists(st.integers(0, 4095), max_size=4, unique=True).map(tuple)


def maybe(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | of


NODES = st.builds(
    NumaNode, st.integers(0, 64), CPUS, maybe(BYTES), maybe(BYTES), st.lists(st.integers(10, 255)).map(tuple),
    st.booleans(),
)  # fmt: skip
GPUS = st.builds(
    Gpu, index=st.integers(0, 8), name=TEXT, uuid=TEXT, total_bytes=BYTES, free_bytes=BYTES,
    capability=st.tuples(st.integers(0, 20), st.integers(0, 9)), pcie_generation=maybe(st.integers(1, 6)),
    pcie_width=maybe(st.integers(1, 16)), pcie_bytes_per_s=maybe(RATE), memory_bytes_per_s=maybe(RATE),
    numa_node=maybe(st.integers(0, 64)), driver=TEXT,
)  # fmt: skip
MACHINES = st.builds(
    Machine, cpu=TEXT, isa=st.lists(TEXT, max_size=3).map(tuple), online_cpus=st.integers(1, 4096), usable_cpus=CPUS,
    quota_cores=maybe(RATE), physical_cores=maybe(st.integers(1, 4096)), cores=st.lists(CPUS, max_size=2).map(tuple),
    l3_bytes=maybe(BYTES), numa=st.lists(NODES, max_size=3).map(tuple), total_bytes=BYTES, available_bytes=BYTES,
    gpus=st.lists(GPUS, max_size=3).map(tuple), gpus_note=TEXT, torch_cuda=maybe(TEXT),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip
ALL_RATES = st.builds(
    Rates,
    ram=st.builds(
        RamRate, bytes_per_s=RATE, threads=st.integers(1, 4096), pages=st.lists(TEXT, max_size=2).map(tuple),
        load=st.builds(Load, maybe(RATE), st.integers(1, 4096)),
    ),
    cpu_flops_per_s=RATE,
    gpus=st.lists(
        st.builds(
            GpuRate, index=st.integers(0, 8), vram_bytes_per_s=RATE, pcie_bytes_per_s=RATE, flops_per_s=RATE,
            sustained_flops_per_s=st.none() | RATE,
        ),
        max_size=2,
    ).map(tuple),
)  # fmt: skip
FILES = st.builds(
    MachineFile, format=st.just(FORMAT), healthy=st.booleans(), machine=MACHINES,
    findings=st.lists(st.builds(Finding, TEXT, st.sampled_from(["ok", "note", "broken"]), TEXT, TEXT)).map(tuple),
    kernels=maybe(st.builds(Kernels, st.sampled_from(ISAS), TEXT)), rates=maybe(ALL_RATES),
)  # fmt: skip


@given(FILES)
def test_round_trip(file: MachineFile) -> None:
    assert parse_machine_file(machine_json(file).encode()) == file


def objects(of: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON value, the outermost first."""
    if isinstance(of, dict):
        yield of
    for inner in of.values() if isinstance(of, dict) else of if isinstance(of, list) else ():
        yield from objects(inner)


@given(FILES, st.data())
def test_an_unknown_key_anywhere_is_refused(file: MachineFile, data: st.DataObject) -> None:
    content = json.loads(machine_json(file))
    place = data.draw(st.sampled_from(list(objects(content))))
    key = data.draw(st.text("abc_", min_size=1).filter(lambda text: text not in place))
    place[key] = data.draw(st.none() | st.integers())
    with pytest.raises(ValueError, match="unknown field"):
        parse_machine_file(json.dumps(content).encode())


@given(st.binary() | TEXT.map(str.encode) | st.recursive(st.none() | st.integers() | TEXT, st.lists).map(
    lambda value: json.dumps(value).encode()))  # fmt: skip
def test_anything_else_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's and Unicode's errors
        parse_machine_file(text)


def written(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(machine_json(FILE))
    change(content)
    file = folder / "machine.json"
    file.write_text(json.dumps(content))
    return file


def test_a_complete_file_describes_a_machine(tmp_path: Path) -> None:
    described = read_machine_file(written(tmp_path, lambda content: None))
    assert described == Described(machine=BOX, kernels=Kernels("avx2", "no avx512"), rates=RATES)
    assert described.rates.of_gpu(0) == RATES.gpus[0]
    assert described.rates.of_gpu(1) is None


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("unknown key", lambda c: c["machine"].update(ram_gb=64), r"unknown field `ram_gb` - at `\$\.machine`"),
    ("unknown rate", lambda c: c["rates"]["gpus"][0].update(hbm=1.0), r"unknown field `hbm`"),
    ("other format", lambda c: c.update(format="proa machine 9"), "has the format 'proa machine 9', not"),
    ("no format", lambda c: c.pop("format"), "missing required field `format`"),
    ("no machine", lambda c: c.pop("machine"), "missing required field `machine`"),
    ("no rates", lambda c: c.pop("rates"), "has no rates: `proa doctor` could not measure that machine"),
    ("no kernels", lambda c: c.update(kernels=None), "has no kernels"),
    ("kernels", lambda c: c["kernels"].update(isa="sse9"), "names the kernels 'sse9', not one of scalar, avx2"),
    ("no CPU", lambda c: c["machine"].update(usable_cpus=[]), "at least one CPU in machine.usable_cpus"),
    ("CPU twice", lambda c: c["machine"].update(usable_cpus=[0, 0]), "at least one CPU in machine.usable_cpus"),
    ("more free", lambda c: c["machine"].update(available_bytes=3 << 30), "available_bytes 3221225472, which is not"),
    ("quota", lambda c: c["machine"].update(quota_cores=0.0), "quota_cores 0.0, which is not above 0"),
    ("type", lambda c: c["machine"].update(total_bytes="64GiB"), r"Expected `int`, got `str` - at `\$\.machine"),
    ("rate 0", lambda c: c["rates"]["ram"].update(bytes_per_s=0), r"> 0.*rates\.ram\.bytes_per_s"),
    ("rate below 0", lambda c: c["rates"].update(cpu_flops_per_s=-1.0), r"> 0.*rates\.cpu_flops_per_s"),
    ("simulated", lambda c: c["machine"]["gpus"][0].update(index=None), "describes a simulated GPU"),
    ("more VRAM free", lambda c: c["machine"]["gpus"][0].update(free_bytes=9 << 30), r"in machine\.gpus\[0\]"),
    ("VRAM rate", lambda c: c["machine"]["gpus"][0].update(memory_bytes_per_s=0.0), "memory_bytes_per_s 0.0"),
    ("GPU twice", lambda c: c["machine"]["gpus"].append(c["machine"]["gpus"][0]), "two GPUs of the same index"),
    ("node twice", lambda c: c["machine"]["numa"].append(c["machine"]["numa"][0]), "two nodes of the same id"),
    ("rate of no GPU", lambda c: c["rates"]["gpus"][0].update(index=3), "one entry of rates.gpus for each"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_impossible_files_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=message) as raised:
        read_machine_file(written(tmp_path, change))
    assert str(tmp_path / "machine.json") in raised.value.message
    assert "proa doctor --json" in raised.value.remedy


@pytest.mark.parametrize(("content", "message"), [(b"{", "is not a machine file"), (b"\xff\xfe", "is not a machine")])
def test_broken_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_machine_file(file)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_machine_file(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_machine_file(tmp_path)


def test_the_rates_of_a_gpu_are_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = GpuRate(
        index=0, vram_bytes_per_s=3.5e12, pcie_bytes_per_s=5.5e10, flops_per_s=6e14, sustained_flops_per_s=5e14
    )
    monkeypatch.setattr("proa.cli.checks.measure_gpu", lambda index: rates)
    measured = Examined(ram=ram_of(), cpu_flops_per_s=1e12)
    finding = gpu_speed(CARD, measured)
    assert finding.status == "ok"
    assert finding.detail == "0: VRAM 3500 GB/s, PCIe 55.0 GB/s, bfloat16 products 600 TFLOP/s, sustained 500 TFLOP/s"
    assert measured.rates is not None
    assert measured.rates.gpus == (rates,)


@pytest.mark.parametrize(
    ("sustained", "seconds", "rate"), [(None, 9.0, 6e14), (5e14, 0.05, 6e14), (5e14, 0.09, 6e14), (5e14, 0.2, 5e14)]
)
def test_long_products_have_the_sustained_rate(sustained: float | None, seconds: float, rate: float) -> None:
    rates = GpuRate(
        index=0, vram_bytes_per_s=1.0, pcie_bytes_per_s=1.0, flops_per_s=6e14, sustained_flops_per_s=sustained
    )
    assert rates.flops_per_s_for(6e14 * seconds) == rate


def test_a_gpu_that_cannot_be_measured_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> GpuRate:
        raise ResourceError(f"The memory of GPU {index} cannot be measured: out of memory.", "")

    monkeypatch.setattr("proa.cli.checks.measure_gpu", fail)
    measured = Examined(ram=ram_of(), cpu_flops_per_s=1e12)
    finding = gpu_speed(CARD, measured)
    assert (finding.status, measured.gpus) == ("note", [])
    assert "0: not measured: The memory of GPU 0 cannot be measured" in finding.detail
    assert finding.remedy
    assert Examined(ram=ram_of()).rates is None
