"""Detection of GPUs through a fake NVML, and the choice of the GPU that is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fake_nvml import Card, FakeNvml
from proa.errors import ResourceError, UsageError
from proa.machine.gpus import cuda_of, find_gpus, visible
from proa.machine.machine import Gpu, Machine
from proa.plan.device import choose, obstacle
from proa.plan.gpu_asked import AskedGpu, asked_experts, asked_gpu, asked_layers

GIB = 1 << 30


def test_all_facts_of_the_driver(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0001:9d:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    nvml = FakeNvml((Card(bus=(1, 0x9D, 0)),))
    found = find_gpus({}, tmp_path, nvml)
    assert found.note == ""
    assert nvml.calls[-1] == "shutdown"
    (gpu,) = found.gpus
    assert gpu == Gpu(
        index=0, name="NVIDIA H200", uuid="GPU-aaaa", bus_id="0001:9d:00.0", total_bytes=140 * GIB,
        free_bytes=139 * GIB, capability=(9, 0), pcie_generation=5, pcie_width=16, pcie_bytes_per_s=16 * 3.938e9,
        memory_bytes_per_s=2 * 3201e6 * 6144 / 8, numa_node=1, driver="570.1",
    )  # fmt: skip
    assert gpu.memory_bytes_per_s == pytest.approx(4.8e12, rel=0.03)  # NVIDIA's data sheet says 4.8 TB/s


def test_unsupported_queries_give_none(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("-1")
    (gpu,) = find_gpus({}, tmp_path, FakeNvml((Card(refused=("mig", "link", "clock")),))).gpus
    assert (gpu.numa_node, gpu.pcie_generation, gpu.pcie_width) == (None, None, None)
    assert (gpu.pcie_bytes_per_s, gpu.memory_bytes_per_s) == (None, None)


@pytest.mark.parametrize(
    ("nvml", "note"),
    [
        (FakeNvml(broken="Library Not Found"), r"no NVIDIA driver is loaded \(Library Not Found\)"),
        (FakeNvml(), "the NVIDIA driver lists none"),
        (FakeNvml((Card(mig=True),)), "GPU 0 cannot be used: it is partitioned by MIG"),
        (FakeNvml((Card(refused=("memory",)),)), "GPU 0 cannot be used: it does not report its memory"),
    ],
)
def test_no_gpus_and_the_reason(nvml: FakeNvml, note: str, tmp_path: Path) -> None:
    found = find_gpus({}, tmp_path, nvml)
    assert found.gpus == ()
    assert re.search(note, found.note)


UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("1", (1,)),
        ("2,0", (2, 0)),
        (" 0 , 2 ", (0, 2)),
        ("0,7,1", (0,)),  # the first invalid entry ends the list
        ("0,,1", (0,)),
        ("1,1", ()),
        ("GPU-bb33,GPU-aa1", (2, 0)),
        ("gpu-BB", (2,)),
        ("GPU-aa", ()),  # an ambiguous prefix
        ("GPU-cc", ()),
        ("MIG-aa11", ()),
    ],
)
def test_cuda_visible_devices(asked: str | None, left: tuple[int, ...]) -> None:
    got, note = visible(UUIDS, asked)
    assert got == left
    assert bool(note) is (len(left) < 3)
    assert f"leaves {len(left)} of 3" in note or not note


def test_gpu_indices_are_those_of_cuda(tmp_path: Path) -> None:
    cards = tuple(Card(uuid=uuid) for uuid in UUIDS)
    found = find_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path, FakeNvml(cards))
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(0, "GPU-bb33"), (1, "GPU-aa11")]


def test_different_gpus_give_a_note_on_numbering(tmp_path: Path) -> None:
    cards = (Card(), Card(name="NVIDIA L4", uuid="GPU-b"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in find_gpus({}, tmp_path, FakeNvml(cards)).note
    assert find_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, tmp_path, FakeNvml(cards)).note == ""


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\ngit_version = 'ab'", "12.8"),
        ("__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None", None),
        ("__all__ = ['cuda', 'hip']\ncuda = \"13.0\"", "13.0"),
        ("", None),
    ],
)
def test_cuda_version_of_torch(text: str, cuda: str | None) -> None:
    assert cuda_of(text) == cuda


def test_detection_imports_no_torch() -> None:
    code = (
        "import sys; from proa.machine.probe import probe; probe(); import proa.plan.device;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.gpu
def test_this_machine_as_torch_sees_it() -> None:
    import torch

    from proa.config.env import cuda_environ

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = find_gpus(cuda_environ()).gpus
    assert len(found) == torch.cuda.device_count()
    for gpu in found:
        seen = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == seen.name
        assert gpu.capability == (seen.major, seen.minor)
        assert str(seen.uuid) in gpu.uuid
        assert seen.total_memory <= gpu.total_bytes <= 1.1 * seen.total_memory  # the driver keeps some


# ---- which one ----


def gpu(index: int = 0, free_gib: float = 20, capability: tuple[int, int] = (8, 9), name: str = "RTX") -> Gpu:
    return Gpu(index=index, name=name, total_bytes=24 * GIB, free_bytes=int(free_gib * GIB), capability=capability)


def machine(*gpus: Gpu, torch_cuda: str | None = "12.8", note: str = "") -> Machine:
    return Machine(
        cpu="Test", online_cpus=1, usable_cpus=(0,), total_bytes=GIB, available_bytes=GIB, gpus=gpus,
        torch_cuda=torch_cuda, gpus_note=note,
    )  # fmt: skip


AUTO = AskedGpu("auto")


@pytest.mark.parametrize(
    ("box", "index", "why"),
    [
        (machine(gpu(), gpu(1, 22)), 1, "most free memory of 2"),
        (machine(gpu(), gpu(1, 20)), 0, "most free memory"),
        (machine(gpu(0, 24, (7, 5)), gpu(1, 10)), 1, "most free memory"),
        (machine(gpu(0, capability=(7, 5))), None, "only with --gpu 0: compute capability 7.5 is best effort"),
        (machine(gpu(0, capability=(6, 1))), None, "compute capability 6.1 is below 7.5"),
        (machine(gpu(), torch_cuda=None), None, "RTX: the installed torch is built without CUDA"),
        (machine(note="none found: no NVIDIA driver is loaded"), None, "no NVIDIA driver"),
        (machine(), None, "no GPU was found"),
    ],
)
def test_auto(box: Machine, index: int | None, why: str) -> None:
    chosen = choose(AUTO, box)
    assert (chosen.gpu.index if chosen.gpu else None) == index
    assert why in chosen.why


def test_by_number() -> None:
    old = gpu(1, capability=(7, 5))
    chosen = choose(AskedGpu("index", 1), machine(gpu(), old))
    assert chosen.gpu == old
    assert "best effort" in chosen.why
    with pytest.raises(UsageError, match=r"--gpu 2: there is no such GPU. There are 0 \(RTX\)"):
        choose(AskedGpu("index", 2), machine(gpu()))
    with pytest.raises(UsageError, match="no NVIDIA driver"):
        choose(AskedGpu("index", 0), machine(note="no NVIDIA driver"))
    with pytest.raises(ResourceError, match=r"built without CUDA.*Install a CUDA build"):
        choose(AskedGpu("index", 0), machine(gpu(), torch_cuda=None))
    with pytest.raises(ResourceError, match=r"below 7\.5"):
        choose(AskedGpu("index", 0), machine(gpu(capability=(6, 0))))
    assert choose(AskedGpu("none"), machine(gpu())).gpu is None


def test_a_simulated_gpu_needs_nothing() -> None:
    chosen = choose(AskedGpu("sim", 0, 512 << 20, 8e9), machine(torch_cuda=None)).gpu
    assert chosen is not None
    assert (chosen.index, chosen.simulated, chosen.free_bytes, chosen.pcie_bytes_per_s) == (None, True, 512 << 20, 8e9)
    assert chosen.name == "simulated, 512 MiB, link of 8.00 GB/s"
    assert obstacle(chosen, None) == ""


# ---- what was asked ----


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("auto", AskedGpu("auto")),
        ("none", AskedGpu("none")),
        ("3", AskedGpu("index", 3)),
        ("sim:512MiB", AskedGpu("sim", 0, 512 << 20)),
        ("sim:1.5G,pcie=8GB/s", AskedGpu("sim", 0, 3 << 29, 8e9)),
        ("sim:1GB,pcie=500MiB/s", AskedGpu("sim", 0, 10**9, float(500 << 20))),
    ],
)
def test_gpus_asked(text: str, asked: AskedGpu) -> None:
    assert asked_gpu(text) == asked


@pytest.mark.parametrize(
    "text",
    ["cuda", "-1", "0,1", "sim", "sim:", "sim:lots", "sim:0", "sim:-1G", "sim:1G,", "sim:1G,8GB/s", "sim:1G,pcie=8GB",
     "sim:1G,pcie=0GB/s", "sim:1G,pcie=fast/s", "²"],
)  # fmt: skip
def test_wrong_gpus_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu is") as refused:
        asked_gpu(text)
    assert refused.value.param == "gpu"
    assert "sim:512MiB" in refused.value.remedy


def test_experts_asked() -> None:
    assert [asked_experts(text) for text in ("auto", "all", "none", "0", "16")] == ["auto", "all", 0, 0, 16]
    for text in ("most", "-1", "1.5", "25%"):
        with pytest.raises(UsageError, match="--gpu-experts"):
            asked_experts(text)


def test_layers_asked() -> None:
    assert asked_layers(None, 10) == frozenset()
    assert asked_layers("0-5,9", 10) == {0, 1, 2, 3, 4, 5, 9}
    assert asked_layers("3, 3,2-3", 10) == {2, 3}
    for text in ("", "a", "1-", "-1", "5-3", "10", "0-10", "1;2", "1,"):
        with pytest.raises(UsageError, match="--gpu-resident-layers"):
            asked_layers(text, 10)
