"""The way from a model's name to a Plan: locate, open, declare, probe, measure, resolve. Never: torch, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from proa.config.options import EngineOptions, MachineOptions
from proa.errors import UsageError
from proa.hub.locate import locate
from proa.machine.machine import Machine
from proa.machine.machine_file import Kernels
from proa.machine.probe import probe
from proa.machine.rates import RamRate
from proa.machine.topology import teams
from proa.models.names import Declared
from proa.native.pool import wished_isa
from proa.native.products import measure_products
from proa.native.ram import measure_ram
from proa.plan.expert_counts import check_writable, read_counts
from proa.plan.opened import Opened, open_model
from proa.plan.plan import Plan
from proa.plan.prefix_files import check_folder
from proa.plan.resolve import Host, resolve
from proa.plan.workers import apart
from proa.types import ProgressCallback
from proa.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Prepared:
    """The plan and its inputs, known before a weight is loaded."""

    plan: Plan
    checkpoint: Checkpoint
    declared: Declared
    machine: Machine


Measure = Callable[[MachineOptions, Machine], RamRate]


def ram_rate(asked: MachineOptions, machine: Machine) -> RamRate:
    """Measure the RAM bandwidth of the CPUs that the engine's workers may get. Takes 0.3 s.

    Raises NativeError, ResourceError.
    """
    threads = min(asked.threads or machine.usable_cores, machine.usable_cores)
    left, _ = apart(asked, machine)
    return measure_ram(machine, teams(left, threads), pinned=asked.cpu_binding != "none")


def cpu_flops(asked: MachineOptions, machine: Machine, isa: str) -> float:
    """Measure the floating-point operations/s of the native kernels `isa` on all workers. Takes 0.1 s.

    Raises NativeError, ResourceError.
    """
    cores = min(machine.physical_cores or machine.usable_cores, machine.usable_cores)
    left, _ = apart(asked, machine)
    found = teams(left, min(asked.threads or cores, machine.usable_cores))
    return measure_products(found, isa, pinned=asked.cpu_binding != "none")


def with_paths(asked: EngineOptions, *, elsewhere: bool = False) -> EngineOptions:
    """The options with absolute paths of what the engine's process writes. Raises UsageError for a path that it could
    not use. elsewhere: on another machine, whose folders are not looked at."""
    gpus, cache = asked.gpus, asked.cache
    if gpus.save_expert_counts is not None:
        file = Path(gpus.save_expert_counts).absolute()
        check_writable(file)
        gpus = replace(gpus, save_expert_counts=str(file))
    if cache.prefix_cache_dir is not None:
        try:
            folder = Path(cache.prefix_cache_dir).expanduser().absolute()
        except RuntimeError as error:
            raise UsageError(
                f"--prefix-cache-dir is {cache.prefix_cache_dir}, but there is no such home folder.",
                "Give an absolute path.", param="prefix_cache_dir",
            ) from error  # fmt: skip
        if not elsewhere:
            check_folder(folder)
        cache = replace(cache, prefix_cache_dir=str(folder))
    return replace(asked, gpus=gpus, cache=cache)


def prepare(
    model: str,
    options: EngineOptions | None = None,
    progress: ProgressCallback | None = None,
    measure: Measure = ram_rate,
    opened: Opened | None = None,
    machine: Machine | None = None,
    kernels: Kernels | None = None,
    when_measured: Callable[[], None] | None = None,
) -> Prepared:
    """Find the model, or fetch it with calls of `progress`, and make its plan. `measure` takes about 0.3 s. opened: the
    model, from open_if_here; None: it is located first. machine: for a plan for another machine; None: this one.
    kernels: the native kernels of that machine; None: the best of this one. when_measured: called when RAM has been
    measured, which needs idle CPUs: an engine's process may begin.

    A model on the hub is planned from its headers before its weights are fetched: one that does not fit is refused.
    Raises ModelError, HubError, UsageError, ResourceError.
    """
    asked = with_paths(options or EngineOptions(), elsewhere=machine is not None)

    def judge(preview: Path, load_format: str) -> None:
        preview_opened = open_model(preview, load_format, asked.model)
        _settle(model, preview_opened, asked, _host(asked, measure, machine, kernels))

    if opened is None:
        dummy = asked.model.load_format == "dummy"
        path = locate(model, asked.model.revision, progress, check=judge, config_only=dummy)
        opened = open_model(path, asked.model.load_format, asked.model)
    host = _host(asked, measure, machine, kernels)
    if when_measured is not None:
        when_measured()
    return _settle(model, opened, asked, host)


def _host(asked: EngineOptions, measure: Measure, machine: Machine | None, kernels: Kernels | None) -> Host:
    machine = machine or probe()
    kernels = kernels or Kernels(*wished_isa())  # first: it raises if the library is broken, which measuring needs
    return Host(machine, measure(asked.machine, machine), kernels.isa, kernels.reason)


def _settle(model: str, opened: Opened, asked: EngineOptions, host: Host) -> Prepared:
    checkpoint, declared = opened.checkpoint, opened.declared
    given = asked.gpus.expert_counts
    counts = () if given is None else read_counts(Path(given), declared.spec)
    return Prepared(resolve(asked, model, checkpoint, declared, host, counts), checkpoint, declared, host.machine)
