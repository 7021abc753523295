"""The choice of a GPU or of none, with the reason. Never: sizes of models."""

from __future__ import annotations

from dataclasses import dataclass

from proa.errors import ResourceError, UsageError
from proa.machine.machine import Gpu, Machine
from proa.obs.units import format_bytes, format_rate
from proa.plan.gpu_asked import AskedGpu

# Compute capabilities: the oldest that kernels are compiled for, and the first with bfloat16 matrix instructions.
LEAST_CAPABILITY, FULL_CAPABILITY = (7, 5), (8, 0)


@dataclass(frozen=True)
class Chosen:
    """The chosen GPU, or None; why: the reason in the start-up table."""

    gpu: Gpu | None
    why: str


def obstacle(gpu: Gpu, torch_cuda: str | None) -> str:
    """The reason why the engine cannot use this GPU; empty if it can."""
    if gpu.simulated:
        return ""
    if gpu.capability < LEAST_CAPABILITY:
        return f"compute capability {_dotted(gpu.capability)} is below {_dotted(LEAST_CAPABILITY)}"
    if torch_cuda is None:
        return "the installed torch is built without CUDA"
    return ""


def best_effort(gpu: Gpu) -> bool:
    """True for a GPU that is usable but has no matrix instructions for bfloat16."""
    return not gpu.simulated and gpu.capability < FULL_CAPABILITY


def choose(asked: AskedGpu, machine: Machine) -> Chosen:
    """Choose the GPU asked for; for "auto" the usable one with most free memory, without GPUs of best effort.

    Raises UsageError for a number that no GPU has, ResourceError for a GPU that cannot be used.
    """
    if asked.kind == "none":
        return Chosen(None, "as asked")
    if asked.kind == "sim":
        return Chosen(_simulated(asked), "as asked: simulated by the CPU, with a part of RAM as its VRAM")
    if asked.kind == "index":
        return _by_index(asked.index, machine)
    usable = [gpu for gpu in machine.gpus if not obstacle(gpu, machine.torch_cuda) and not best_effort(gpu)]
    if not usable:
        return Chosen(None, "; ".join(_reasons(machine)) or "no GPU was found")
    best = max(usable, key=lambda gpu: gpu.free_bytes)
    why = "the only GPU" if len(machine.gpus) == 1 else f"most free memory of {len(machine.gpus)} GPUs; one is used"
    return Chosen(best, why + _facts(best, machine))


def _by_index(index: int, machine: Machine) -> Chosen:
    found = next((gpu for gpu in machine.gpus if gpu.index == index), None)
    if found is None:
        listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in machine.gpus)
        have = f"There are {listed}" if listed else f"GPUs: {machine.gpus_note or 'none found'}"
        raise UsageError(f"--gpu {index}: there is no such GPU. {have}.", "`proa doctor` lists GPUs.", param="gpu")
    if why := obstacle(found, machine.torch_cuda):
        remedy = "Install a CUDA build of torch, or use --gpu none." if "torch" in why else "Use --gpu none."
        raise ResourceError(f"--gpu {index} ({found.name}) cannot be used: {why}.", remedy, param="gpu")
    slow = "; best effort: it has no matrix instructions for bfloat16" if best_effort(found) else ""
    return Chosen(found, "as asked" + slow + _facts(found, machine))


def _simulated(asked: AskedGpu) -> Gpu:
    link = f", link of {format_rate(asked.pcie_bytes_per_s)}" if asked.pcie_bytes_per_s else ""
    return Gpu(
        index=None,
        name=f"simulated, {format_bytes(asked.sim_bytes)}{link}",
        total_bytes=asked.sim_bytes,
        free_bytes=asked.sim_bytes,
        capability=(0, 0),
        pcie_bytes_per_s=asked.pcie_bytes_per_s,
        simulated=True,
    )


def _reasons(machine: Machine) -> list[str]:
    """The reasons why "auto" uses no GPU, one per GPU."""
    reasons = [machine.gpus_note] if machine.gpus_note else []
    for gpu in machine.gpus:
        hint = f"only with --gpu {gpu.index}: compute capability {_dotted(gpu.capability)} is best effort"
        reasons.append(f"{gpu.name}: {obstacle(gpu, machine.torch_cuda) or hint}")
    return reasons


def _facts(gpu: Gpu, machine: Machine) -> str:
    link = f"; PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}" if gpu.pcie_generation and gpu.pcie_width else ""
    return link + (f"; {machine.gpus_note}" if machine.gpus_note else "")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
