"""From a model's name to a Plan: locate, open, declare, probe, measure, resolve. Never: torch, weights, decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from proa.config.options import EngineOptions, MachineOptions
from proa.hub.locate import locate
from proa.machine.machine import Machine
from proa.machine.probe import probe
from proa.machine.rates import RamRate
from proa.machine.topology import teams
from proa.models.names import Declared
from proa.native.pool import wished_isa
from proa.native.ram import measure_ram
from proa.plan.expert_counts import check_writable, read_counts
from proa.plan.opened import Opened, open_model
from proa.plan.plan import Plan
from proa.plan.resolve import Host, resolve
from proa.plan.workers import apart
from proa.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Prepared:
    """All that is known before a weight is loaded."""

    plan: Plan
    checkpoint: Checkpoint
    declared: Declared
    machine: Machine


Measure = Callable[[MachineOptions, Machine], RamRate]


def ram_rate(asked: MachineOptions, machine: Machine) -> RamRate:
    """How fast the CPUs that the engine's workers may get read RAM now. Takes 0.3 s.

    Raises NativeError, ResourceError.
    """
    threads = min(asked.threads or machine.usable_cores, machine.usable_cores)
    left, _ = apart(asked, machine)
    return measure_ram(machine, teams(left, threads), pinned=asked.cpu_binding != "none")


def prepare(
    model: str,
    options: EngineOptions | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    measure: Measure = ram_rate,
    opened: Opened | None = None,
    machine: Machine | None = None,
) -> Prepared:
    """Find (or fetch, reporting to `progress`) the model and settle everything. Takes about 0.3 s for measuring RAM,
    which `measure` does. opened: the model, from open_if_here; else it is looked for. machine: where the plan is for
    another one than this.

    A model on the hub is judged by its headers, with the same plan, before its weights are fetched.
    Raises ModelError, HubError, UsageError, ResourceError.
    """
    asked = options or EngineOptions()

    def judge(preview: Path, load_format: str) -> None:
        _settle(model, open_model(preview, load_format, asked.model), asked, measure, machine)

    if opened is None:
        dummy = asked.model.load_format == "dummy"
        path = locate(model, asked.model.revision, progress, check=judge, config_only=dummy)
        opened = open_model(path, asked.model.load_format, asked.model)
    return _settle(model, opened, asked, measure, machine)


def _settle(
    model: str, opened: Opened, asked: EngineOptions, measure: Measure, machine: Machine | None
) -> Prepared:  # fmt: skip
    checkpoint, declared = opened.checkpoint, opened.declared
    machine = machine or probe()
    isa, isa_reason = wished_isa()  # what is wrong with the native library is said before it measures anything
    host = Host(machine, measure(asked.machine, machine), isa, isa_reason)
    gpus = asked.gpus
    counts = () if gpus.expert_counts is None else read_counts(Path(gpus.expert_counts), declared.spec)
    if gpus.save_expert_counts is not None:
        file = Path(gpus.save_expert_counts).absolute()  # the engine's process writes it
        check_writable(file)
        asked = replace(asked, gpus=replace(gpus, save_expert_counts=str(file)))
    return Prepared(resolve(asked, model, checkpoint, declared, host, counts), checkpoint, declared, machine)
