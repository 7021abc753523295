"""`proa plan`: shows the plan that `proa serve` would make, and predicts its speed, without loading the model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proa.config.field import argument, option
from proa.config.options import EngineOptions
from proa.config.parse import given_options, parse
from proa.obs.console import console_err, console_out, write_out

if TYPE_CHECKING:
    from proa.machine.rates import Rates
    from proa.plan.prepare import Prepared

SUMMARY = "plan a model for this machine or another, and predict its speed, without loading it"
EPILOG = """\
Give the same options of the engine as to `proa serve`: the plan is made by the same code. Only config and headers are
read, of a hub model too; a folder may have a config.json alone, then its quantisation config says the weights' types.
`proa doctor --json > FILE` on another machine describes it for --machine FILE; this one is not measured then.
See also: docs/planning.md explains the predictions, and compares them with measurements."""


@dataclass(frozen=True)
class PlanCommand:
    """options"""

    model: str = argument(
        help="a Hugging Face folder (a config.json suffices), a GGUF file, a hub id, a name that `proa models` lists, "
        "demo or demo-dense",
        metavar="MODEL",
    )
    machine: str | None = option(
        None,
        help="plan for the machine that this file describes, which `proa doctor --json` wrote there; default: this "
        "machine, measured now",
        metavar="FILE",
        common=True,
    )
    engine: EngineOptions = field(default_factory=EngineOptions)
    json: bool = option(False, help="print JSON: the start-up report, memory nodes, predictions", common=True)


def run(argv: Sequence[str]) -> int:
    begin_s = time.perf_counter()
    parsed = parse(PlanCommand, argv, prog="proa plan", summary=SUMMARY, epilog=EPILOG)
    command = parsed.options
    # Imported here, as --help does not need them.
    from proa.cli.plan_report import PlanReport, plan_json, render_planned
    from proa.cli.report import Report
    from proa.obs.version import proa_version
    from proa.plan.nodes import node_shares
    from proa.plan.predict import predict
    from proa.plan.work import planned_work

    prepared, rates = _prepared(command)
    plan = prepared.plan
    work = planned_work(plan, command.engine.model, prepared.declared, prepared.checkpoint)
    report = PlanReport(
        start_up=Report(proa_version(), plan, prepared.declared.spec, given_options(command.engine, parsed.sources)),
        machine=prepared.machine,
        machine_file=command.machine,
        nodes=node_shares(plan, prepared.machine),
        predictions=predict(plan, work, rates),
        seconds=time.perf_counter() - begin_s,
    )
    if command.json:
        write_out(json.dumps(plan_json(report)) + "\n")
    else:
        console_out().print(render_planned(report))
    return 0


def _prepared(command: PlanCommand) -> tuple[Prepared, Rates]:
    """Plan for the machine of --machine, or for this one; return the plan and that machine's measured rates."""
    from proa.machine.machine_file import Kernels, read_machine_file
    from proa.machine.probe import probe
    from proa.machine.rates import Rates
    from proa.native.pool import wished_isa
    from proa.obs.progress import show_progress
    from proa.plan.headers import open_headers
    from proa.plan.prepare import cpu_flops, prepare, ram_rate

    asked, file = command.engine, command.machine
    described = None if file is None else read_machine_file(Path(file))
    with show_progress(console_err()) as show:
        opened = open_headers(command.model, asked.model, show)
    if described is None:
        machine, kernels = probe(), Kernels(*wished_isa())
        flops = cpu_flops(asked.machine, machine, kernels.isa)
        rates = Rates(ram=ram_rate(asked.machine, machine), cpu_flops_per_s=flops)
    else:
        machine, kernels, rates = described.machine, described.kernels, described.rates
    prepared = prepare(
        command.model, asked, measure=lambda *_: rates.ram, opened=opened, machine=machine, kernels=kernels
    )
    return prepared, rates
