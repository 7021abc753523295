"""The checks of `proa doctor`: each returns one or more findings; some measure the machine's rates."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from proa.bench.gpu_rates import measure_gpu
from proa.config.env import read_env
from proa.config.options import MachineOptions, ServerOptions
from proa.errors import NativeError, ResourceError, UsageError
from proa.machine.machine import Gpu, Machine
from proa.machine.machine_file import Finding, Kernels
from proa.machine.rates import GpuRate, RamRate, Rates
from proa.native.pool import wished_isa
from proa.obs.units import format_bytes, format_flops, format_rate
from proa.plan.device import best_effort, obstacle
from proa.plan.prepare import cpu_flops, ram_rate

_LEAST_DISK_BYTES = 2 << 30  # the demo model and room to build it
_LEAST_RAM_BYTES = 2 << 30  # two Python processes, torch and the demo model
_OLDEST_PYTHON = (3, 11)


@dataclass
class Examined:
    """What the checks measure, for the machine file; None if it could not be measured."""

    kernels: Kernels | None = None
    ram: RamRate | None = None
    cpu_flops_per_s: float | None = None
    gpus: list[GpuRate] = field(default_factory=list)

    @property
    def rates(self) -> Rates | None:
        if self.ram is None or self.cpu_flops_per_s is None:
            return None
        return Rates(ram=self.ram, cpu_flops_per_s=self.cpu_flops_per_s, gpus=tuple(self.gpus))


def findings(machine: Machine, measured: Examined) -> Iterator[Finding]:
    """Run all checks, in the order of the report, and fill in `measured`."""
    yield from _python()
    yield from _processor(machine)
    yield _memory(machine)
    yield _bandwidth(machine, measured)
    yield from _disks()
    yield port(ServerOptions().host, ServerOptions().port)
    yield from _computing(machine, measured)
    yield from gpus(machine)
    for gpu in machine.gpus:
        if not obstacle(gpu, machine.torch_cuda):
            yield gpu_speed(gpu, measured)


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        yield Finding("Python", "broken", found, f"Proa needs Python {oldest} or newer.")
    else:
        yield Finding("Python", "ok", f"{found}, {sys.executable}")
    try:
        needed = metadata.requires("proa") or []
    except metadata.PackageNotFoundError:
        yield Finding("packages", "note", "Proa runs from its source folder, not installed", "Run `pip install -e .`.")
        return
    versions, wrong = [], []
    for requirement in needed:
        if "extra ==" in requirement:
            continue
        name, installed, problem = package_state(requirement)
        versions.append(f"{name} {installed}")
        if problem:
            wrong.append(problem)
    if wrong:
        yield Finding("packages", "broken", "; ".join(wrong), "Run `pip install --upgrade proa`.")
    yield Finding("packages", "ok", ", ".join(versions))
    if sys.pycache_prefix is not None:
        yield Finding("bytecode", "ok", f"kept in {sys.pycache_prefix}")


def package_state(requirement: str) -> tuple[str, str, str]:
    """Check a requirement such as "torch>=2.11"; return (name, installed version or "missing", problem or "")."""
    match = re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?", requirement)
    name, least = (match[1], match[2]) if match else (requirement, None)
    version = _installed(name)
    if version is None:
        return name, "missing", f"{name} is not installed"
    if least and _release(version) < _release(least):
        return name, version, f"{name} {version} is older than {least}"
    return name, version, ""


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Parse the numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _processor(machine: Machine) -> Iterator[Finding]:
    cores = f"{machine.usable_cores} of {machine.online_cpus} logical CPUs usable"
    if machine.quota_cores is not None:
        cores += f" (quota {machine.quota_cores:.4g} cores)"
    yield Finding("CPU", "ok", f"{machine.cpu}; {cores}; {' '.join(machine.isa) or 'no vector extensions known'}")
    for note in machine.notes:
        yield Finding("CPU", "note", note)


def _memory(machine: Machine) -> Finding:
    detail = (
        f"{format_bytes(machine.available_bytes)} of {format_bytes(machine.total_bytes)} available "
        f"(limited by {machine.memory_bound_by})"
    )
    if machine.available_bytes < _LEAST_RAM_BYTES:
        least = format_bytes(_LEAST_RAM_BYTES)
        return Finding("memory", "note", detail, f"The demo model needs about {least}: close other programs.")
    return Finding("memory", "ok", detail)


def _bandwidth(machine: Machine, measured: Examined) -> Finding:
    try:
        ram = measured.ram = ram_rate(MachineOptions(), machine)
    except (NativeError, ResourceError) as e:
        return Finding("RAM speed", "note", f"not measured: {e.message}", e.remedy or "Free some memory.")
    detail = f"{format_rate(ram.bytes_per_s)}, which limits decode on the CPU; {ram.source}"
    if ram.load.busy:
        return Finding("RAM speed", "note", detail, "Stop other programs and measure again.")
    return Finding("RAM speed", "ok", detail)


def _disks() -> Iterator[Finding]:
    sockets = Path(tempfile.gettempdir())  # the private sockets between Proa's processes
    try:
        yield disk("cache", read_env().cache)
    except UsageError as e:  # no home folder
        yield Finding("cache folder", "broken", e.message, e.remedy)
    for name, folder in (("model hub", _hub_cache()), ("temporary", sockets)):
        yield disk(name, folder)


def disk(name: str, folder: Path) -> Finding:
    """Check that files can be written below a folder (which may not exist yet), and how much space is free."""
    existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))  # False without access, unlike Path's
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_bytes = shutil.disk_usage(existing).free
    except OSError as e:
        return Finding(
            f"{name} folder", "broken", f"{folder} cannot be written: {e.strerror}", "Give write access to it."
        )
    detail = f"{folder}, {format_bytes(free_bytes)} free"
    if free_bytes < _LEAST_DISK_BYTES and name != "temporary":
        return Finding(f"{name} folder", "note", detail, "Models are large: make room, or choose another disk.")
    return Finding(f"{name} folder", "ok", detail)


def _hub_cache() -> Path:
    from huggingface_hub import constants  # takes 0.1 s to import, and only `proa doctor` needs it here

    return Path(constants.HF_HUB_CACHE)


def port(host: str, number: int) -> Finding:
    """Check that a server could listen on this address and port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError:
            remedy = "If that program is not Proa, serve on another port: --port 0 picks a free one."
            return Finding("port", "note", f"a program already listens on {host}:{number}", remedy)
    return Finding("port", "ok", f"{host}:{number} is free")


def _computing(machine: Machine, measured: Examined) -> Iterator[Finding]:
    try:
        import torch  # noqa: F401  # takes seconds, and its failure is a finding
    except (ImportError, OSError) as e:
        yield Finding("computing", "broken", f"torch cannot be loaded: {e}", "Install torch again.")
        return
    try:
        isa, reason = wished_isa()
    except (NativeError, UsageError) as e:
        yield Finding("computing", "broken", e.message, e.remedy)
        return
    measured.kernels = Kernels(isa, reason)
    why = f" ({reason})" if reason else ""
    yield Finding("computing", "ok", f"on the CPU, native {isa} kernels{why}")
    try:
        flops = measured.cpu_flops_per_s = cpu_flops(MachineOptions(), machine, isa)
    except (NativeError, ResourceError) as e:
        yield Finding("CPU products", "note", f"not measured: {e.message}", e.remedy or "Stop other programs.")
        return
    yield Finding("CPU products", "ok", f"{format_flops(flops)}, which limit prompts on the CPU")


def gpu_speed(gpu: Gpu, measured: Examined) -> Finding:
    """Measure a GPU's VRAM, PCIe link and products in a child process, in some seconds."""
    assert gpu.index is not None
    try:
        found = measure_gpu(gpu.index)
    except ResourceError as e:
        return Finding(
            "GPU speed", "note", f"{gpu.index}: not measured: {e.message}", "Free its memory, and try again."
        )
    measured.gpus.append(found)
    detail = f"{gpu.index}: VRAM {format_rate(found.vram_bytes_per_s)}, PCIe {format_rate(found.pcie_bytes_per_s)}"
    products = f"bfloat16 products {format_flops(found.flops_per_s)}"
    if found.sustained_flops_per_s is not None:
        products += f", sustained {format_flops(found.sustained_flops_per_s)}"
    return Finding("GPU speed", "ok", f"{detail}, {products}")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Check each GPU: can the engine use it?"""
    if not machine.gpus:
        yield Finding("GPU", "ok", f"{machine.gpus_note or 'none found'}: the CPU computes")
    elif machine.gpus_note:
        yield Finding("GPU", "note", machine.gpus_note, "See CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.")
    for gpu in machine.gpus:
        detail = _gpu_line(gpu)
        if why := obstacle(gpu, machine.torch_cuda):
            remedy = "Install a CUDA build of torch." if machine.torch_cuda is None else "The CPU computes instead."
            yield Finding("GPU", "note", f"{detail}; not usable: {why}", remedy)
        elif best_effort(gpu):
            yield Finding("GPU", "note", f"{detail}; best effort: no matrix instructions for bfloat16",
                          f"It is used only with --gpu {gpu.index}.")  # fmt: skip
        else:
            yield Finding("GPU", "ok", f"{detail}; usable, torch is built with CUDA {machine.torch_cuda}")


def _gpu_line(gpu: Gpu) -> str:
    facts = [
        f"{gpu.index}: {gpu.name}",
        f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free",
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]}",
    ]
    if gpu.pcie_generation and gpu.pcie_width:
        rate = f" ({format_rate(gpu.pcie_bytes_per_s)})" if gpu.pcie_bytes_per_s else ""
        facts.append(f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}{rate}")
    if gpu.memory_bytes_per_s:
        facts.append(f"memory {format_rate(gpu.memory_bytes_per_s)} by its data sheet")
    if gpu.numa_node is not None:
        facts.append(f"NUMA node {gpu.numa_node}")
    return ", ".join([*facts, f"driver {gpu.driver}"])
