"""The machine file: a machine with its measured rates as JSON. `proa doctor --json` writes it, `proa plan --machine`
reads it, strictly. Never: measuring.

    format    "proa machine 1"; changes if the meaning of a key changes
    healthy   false if a finding is "broken"
    findings  [{name, status, detail, remedy}]
    machine   of machine/machine.py: CPUs, memory, nodes, GPUs
    kernels   {isa, reason}: the best instruction set of the native kernels there, and why not a better one
    rates     {ram: {bytes_per_s, threads, pages, load: {others, cpus}}, cpu_flops_per_s,
              gpus: [{index, vram_bytes_per_s, pcie_bytes_per_s, flops_per_s, sustained_flops_per_s or null}]}

kernels and rates are null if the native library is missing. An unknown key anywhere is an error, because a misspelt
rate would silently not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from proa.errors import UsageError
from proa.machine.machine import Gpu, Machine
from proa.machine.rates import Rates

FORMAT = "proa machine 1"
ISAS = ("scalar", "avx2", "avx512", "avx512-bf16", "amx")
_WRITE = "Write it on that machine with `proa doctor --json > FILE`, by this version of Proa."


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a check of `proa doctor`. "note": a limitation; "broken": Proa cannot run. `remedy` is empty if
    there is nothing to do."""

    name: str
    status: Literal["ok", "note", "broken"]
    detail: str
    remedy: str = ""


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best instruction set of the native kernels that a CPU runs, and why not a better one."""

    isa: str
    reason: str = ""


class MachineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a machine file; only format and machine are required, and kernels and rates for a plan."""

    format: str
    healthy: bool = True
    findings: tuple[Finding, ...] = ()
    machine: Machine
    kernels: Kernels | None = None
    rates: Rates | None = None


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that is complete enough to plan for."""

    machine: Machine
    kernels: Kernels
    rates: Rates


def machine_json(file: MachineFile) -> str:
    """Format a machine file."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2).decode() + "\n"


def read_machine_file(path: Path) -> Described:
    """Read and check a machine file. Raises UsageError for a file that is unreadable, of another format, has unknown
    or missing keys, impossible values, or no rates."""
    try:
        found = parse_machine_file(path.read_bytes())
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # msgspec's errors are ValueErrors; so is invalid UTF-8
        raise _wrong(path, f"is not a machine file: {error}") from error
    if problem := _problem(found):
        raise _wrong(path, problem)
    if found.kernels is None or found.rates is None:
        missing = "kernels" if found.kernels is None else "rates"
        raise _wrong(path, f"has no {missing}: `proa doctor` could not measure that machine, and its findings say why")
    return Described(machine=found.machine, kernels=found.kernels, rates=found.rates)


def parse_machine_file(text: bytes) -> MachineFile:
    """Parse a machine file; its values are not compared with each other. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=MachineFile)


def _problem(file: MachineFile) -> str:
    """The first value that no machine has; "" if there is none."""
    if file.format != FORMAT:
        return f"has the format {file.format!r}, not {FORMAT!r}"
    if file.kernels is not None and file.kernels.isa not in ISAS:
        return f"names the kernels {file.kernels.isa!r}, not one of {', '.join(ISAS)}"
    return _machine_problem(file.machine) or _rates_problem(file.machine, file.rates)


def _machine_problem(of: Machine) -> str:
    if not of.usable_cpus or len(set(of.usable_cpus)) < len(of.usable_cpus):
        return "must list at least one CPU in machine.usable_cpus, and each once"
    if not 0 <= of.available_bytes <= of.total_bytes:
        return f"has available_bytes {of.available_bytes}, which is not from 0 to total_bytes, {of.total_bytes}"
    if of.quota_cores is not None and of.quota_cores <= 0:
        return f"has quota_cores {of.quota_cores}, which is not above 0"
    if len({node.id for node in of.numa}) < len(of.numa):
        return "has two nodes of the same id in machine.numa"
    return next(filter(None, (_gpu_problem(i, gpu) for i, gpu in enumerate(of.gpus))), "") or _same_index(of.gpus)


def _gpu_problem(number: int, of: Gpu) -> str:
    where = f"machine.gpus[{number}]"
    if of.index is None or of.simulated:
        return f"describes a simulated GPU in {where}; use --gpu sim:SIZE for one"
    if not 0 <= of.free_bytes <= of.total_bytes:
        return f"has free_bytes {of.free_bytes} in {where}, which is not from 0 to total_bytes, {of.total_bytes}"
    rates = {"pcie_bytes_per_s": of.pcie_bytes_per_s, "memory_bytes_per_s": of.memory_bytes_per_s}
    wrong = next((name for name, rate in rates.items() if rate is not None and rate <= 0), None)
    return f"has {wrong} {rates[wrong]} in {where}, which is not above 0" if wrong else ""


def _same_index(gpus: tuple[Gpu, ...]) -> str:
    return "has two GPUs of the same index" if len({gpu.index for gpu in gpus}) < len(gpus) else ""


def _rates_problem(machine: Machine, rates: Rates | None) -> str:
    if rates is None:
        return ""
    indices = [of.index for of in rates.gpus]
    if len(set(indices)) < len(indices) or not set(indices) <= {gpu.index for gpu in machine.gpus}:
        return "must have at most one entry of rates.gpus for each of machine.gpus, by its index"
    return ""


def _wrong(path: Path, what: str) -> UsageError:
    return UsageError(f"The machine file {path} {what}.", _WRITE, param="machine")
