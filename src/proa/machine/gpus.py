"""Finds NVIDIA GPUs through the driver's management library (NVML), without torch or a CUDA context.

NVML numbers GPUs by PCI address. CUDA numbers only those in CUDA_VISIBLE_DEVICES, in that order; without
CUDA_DEVICE_ORDER=PCI_BUS_ID it puts the fastest GPU first, which matters only if GPUs differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from proa.machine.files import read_int, read_text
from proa.machine.machine import Gpu

T = TypeVar("T")

# One lane, one way, after line coding: bytes/s by PCIe generation.
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


class Nvml(Protocol):
    """The functions of the module pynvml that are used here; handles are opaque."""

    NVMLError: type[Exception]
    NVML_CLOCK_MEM: int

    def nvmlInit(self) -> None: ...  # noqa: N802 - the library's names
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: Any, /) -> str: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, /) -> Sequence[int]: ...  # noqa: N802
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Sequence[int]: ...  # noqa: N802
    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetMemoryBusWidth(self, handle: Any, /) -> int: ...  # noqa: N802


@dataclass(frozen=True)
class FoundGpus:
    """GPUs in CUDA's order; `note`: why there are none, or fewer than installed, or what is uncertain."""

    gpus: tuple[Gpu, ...] = ()
    note: str = ""


def find_gpus(environ: Mapping[str, str], root: Path = Path("/"), nvml: Nvml | None = None) -> FoundGpus:
    """Find the GPUs that CUDA would show to a process with this environment. `root`: folder that contains /sys; `nvml`:
    replaces pynvml, for tests."""
    if nvml is None:
        try:
            import pynvml  # imported here, as it is used only once
        except ImportError:
            return FoundGpus(note="GPUs not detected: the package nvidia-ml-py is not installed")
        nvml = cast(Nvml, pynvml)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return FoundGpus(note=f"none found: no NVIDIA driver is loaded ({error})")
    try:
        return _found(nvml, environ, root)
    except nvml.NVMLError as error:
        return FoundGpus(note=f"none found: the NVIDIA driver failed ({error})")
    finally:
        nvml.nvmlShutdown()


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch was built with, without importing torch; None if torch has no
    CUDA or is not installed."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    except metadata.PackageNotFoundError:
        return None
    return cuda_of(read_text(file) or "")


def cuda_of(version_py: str) -> str | None:
    """Parse the CUDA version from the text of torch/version.py; None if it has none."""
    match = re.search(r"""^cuda\b[^=\n]*=\s*['"]([\d.]+)['"]""", version_py, re.MULTILINE)
    return match[1] if match else None


def visible(uuids: Sequence[str], asked: str | None) -> tuple[tuple[int, ...], str]:
    """Apply CUDA_VISIBLE_DEVICES (`asked`); return (indices of the visible GPUs in its order, a note on hidden GPUs).

    CUDA's rules: entries are numbers or prefixes of UUIDs; the first invalid entry ends the list; a duplicate hides all
    GPUs.
    """
    if asked is None:
        return tuple(range(len(uuids))), ""
    left: list[int] = []
    for entry in (part.strip() for part in asked.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:
            break
        left += matches
    if len(set(left)) < len(left):
        left = []
    note = f"CUDA_VISIBLE_DEVICES={asked} leaves {len(left)} of {len(uuids)} GPUs" if len(left) < len(uuids) else ""
    return tuple(left), note


def _found(nvml: Nvml, environ: Mapping[str, str], root: Path) -> FoundGpus:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    driver = nvml.nvmlSystemGetDriverVersion()
    shown, hidden = visible([nvml.nvmlDeviceGetUUID(h) for h in handles], environ.get("CUDA_VISIBLE_DEVICES"))
    gpus, notes = [], [hidden] if hidden else []
    for index, physical in enumerate(shown):
        seen = _describe(nvml, handles[physical], root)
        if isinstance(seen, Gpu):
            gpus.append(msgspec.structs.replace(seen, index=index, driver=driver))
        else:
            notes.append(f"GPU {index} cannot be used: {seen}")
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        notes.append("GPUs differ, and CUDA may number them differently: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return FoundGpus(tuple(gpus), "; ".join(notes) or ("" if handles else "none found: the NVIDIA driver lists none"))


def _describe(nvml: Nvml, handle: Any, root: Path) -> Gpu | str:
    """Describe a GPU, without its index and driver version; or return the reason why it cannot be used."""

    def tried(ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except nvml.NVMLError:  # not every GPU supports every query
            return None

    mig = tried(lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig is not None and mig[0]:
        return "it is partitioned by MIG"
    memory = tried(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    if memory is None:
        return "it does not report its memory size"
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    bus_id = _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
    generation = tried(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    width = tried(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    lane = LANE_BYTES_PER_S.get(generation or 0)
    clock_mhz = tried(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    bus_bits = tried(lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    node = read_int(root / f"sys/bus/pci/devices/{bus_id}/numa_node")
    return Gpu(
        index=None,
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bus_id=bus_id,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=(major, minor),
        pcie_generation=generation,
        pcie_width=width,
        pcie_bytes_per_s=lane * width if lane and width else None,
        # Two transfers per clock cycle, for the clocks that NVML reports, of HBM and GDDR alike.
        memory_bytes_per_s=2e6 * clock_mhz * bus_bits / 8 if clock_mhz and bus_bits else None,
        numa_node=node if node is not None and node >= 0 else None,  # -1: the firmware does not say
    )


def _bus_id(pci: Any) -> str:
    """Format a PCI address as /sys does: "0000:17:00.0"."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
