"""`proa warm`: compiles a model's GPU kernels before its first start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from proa.config.env import child_environ
from proa.config.field import argument, option
from proa.config.options import MODEL_HELP, EngineOptions, MachineOptions
from proa.config.parse import parse
from proa.errors import ResourceError, UsageError
from proa.obs.console import console_err, write_out

if TYPE_CHECKING:
    from proa.machine.machine import Machine
    from proa.machine.rates import RamRate
    from proa.plan.prepare import Prepared
    from proa.types import ProgressCallback

SUMMARY = "compile a model's GPU kernels before its first start"
EPILOG = """\
Give the same options as to `proa serve`: the kernels depend on them. Compiled kernels are stored in the cache folder
(PROA_CACHE), which can be part of a container image. A second run finds all kernels there and compiles none."""
_RAM_BYTES_PER_S = 100e9


@dataclass(frozen=True)
class WarmCommand:
    """options"""

    model: str = argument(help=MODEL_HELP, metavar="MODEL")
    engine: EngineOptions = field(default_factory=EngineOptions)
    arch: str | None = option(
        None,
        help="compile for a GPU of this architecture, such as sm_90, which need not be present; requires --vram, that "
        "GPU's memory; RAM is assumed to be sufficient",
        metavar="ARCH",
        kind="word",
        common=True,
    )
    json: bool = option(False, help="print the result as JSON", common=True)


@dataclass
class _Result:
    """Numbers of kernel variants; the JSON output."""

    arch: str
    folder: str
    seconds: float
    variants: int = 0
    compiled: int = 0
    kept: int = 0  # found in the cache
    failed: list[str] = field(default_factory=list)
    no_launchers: str = ""


def run(argv: Sequence[str]) -> int:
    command = parse(WarmCommand, argv, prog="proa warm", summary=SUMMARY, epilog=EPILOG).options
    if find_spec("triton") is None:
        raise ResourceError("Triton, which compiles GPU kernels, is not installed.", "Install a CUDA build of torch.")
    os.environ.update(child_environ())  # the engine's environment, with the folder of Triton's cache
    result = _warm(command)
    write_out(json.dumps(result.__dict__) + "\n" if command.json else _summary(result))
    return 1 if result.failed else 0


def _warm(command: WarmCommand) -> _Result:
    # Torch and Triton take seconds to import: only after the options are checked.
    from proa.obs.progress import COMPILING, show_progress

    begin = time.perf_counter()
    with show_progress(console_err()) as show:
        prepared = _prepared(command, show)
        from proa.engine.building.compile_ahead import Done, Listed, compile_ahead

        gpu = prepared.plan.gpu
        assert gpu is not None
        arch = command.arch or f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        result = _Result(arch, os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"), 0.0)
        for event in compile_ahead(prepared.plan, prepared.checkpoint, prepared.declared, launchers=True):
            match event:
                case Listed(variants, _, why):
                    result.variants, result.no_launchers = len(variants), why
                case Done(variant, compiled) if compiled.error:
                    result.failed.append(f"{variant.name}: {compiled.error}")
                case Done(_, compiled):
                    result.kept += compiled.cached
                    result.compiled += not compiled.cached
            show(COMPILING, result.compiled + result.kept + len(result.failed), result.variants)
    result.seconds = round(time.perf_counter() - begin, 2)
    return result


def _not_measured(asked: MachineOptions, machine: Machine) -> RamRate:
    """Return a placeholder for the RAM rate of the target machine; no kernel depends on it."""
    from proa.machine.load import Load
    from proa.machine.rates import RamRate

    return RamRate(bytes_per_s=_RAM_BYTES_PER_S, threads=1, pages=(), load=Load(None, 1))


def _prepared(command: WarmCommand, show: ProgressCallback) -> Prepared:
    from proa.machine.absent import with_gpu
    from proa.machine.probe import probe
    from proa.plan.prepare import prepare

    asked = command.engine
    if command.arch is None:
        prepared = prepare(command.model, asked, show)
    else:
        if asked.gpus.vram is None or asked.gpus.gpu != "auto":
            raise UsageError(
                f"--arch {command.arch} requires --vram (the GPU's memory), and excludes --gpu.",
                f"For example: `proa warm {command.model} --arch {command.arch} --vram 80GiB`.",
                param="arch",
            )
        machine = with_gpu(probe(), command.arch, asked.gpus.vram)
        prepared = prepare(command.model, asked, show, _not_measured, machine=machine)
    if prepared.plan.gpu is None or prepared.plan.gpu.simulated:
        why = next(d.why for d in prepared.plan.decisions if d.name == "GPU")
        raise UsageError(
            f"With these options the engine would use no GPU, so there is nothing to compile: {why}.",
            "For a GPU that is not in this machine, add for example --arch sm_90 --vram 80GiB.",
            param="gpu",
        )
    return prepared


def _summary(result: _Result) -> str:
    kernels, where = f"{result.variants} kernels for {result.arch}", f"in {result.folder}"
    if result.kept == result.variants:
        return f"nothing to do: all {kernels} are {where}\n"
    lines = [f"{kernels}: {result.compiled} compiled in {result.seconds:.1f} s, {result.kept} cached; {where}"]
    lines += [f"failed: {failed}" for failed in result.failed]
    if result.no_launchers:
        lines.append(f"kernel launchers will be built at the first start: {result.no_launchers.splitlines()[0]}")
    return "\n".join(lines) + "\n"
