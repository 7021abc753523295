"""`proa doctor`: runs the checks of cli/checks.py and prints them as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proa.config.field import option
from proa.config.parse import parse
from proa.obs.console import console_out, write_out

if TYPE_CHECKING:
    from proa.machine.machine_file import Finding

SUMMARY = "check this machine and suggest remedies for problems"
EPILOG = "The exit code is 1 if a check is broken, else 0."
_STYLE = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class DoctorOptions:
    """options"""

    json: bool = option(
        False,
        help="print JSON: {format, healthy, findings, machine, kernels, rates}, which `proa plan --machine` reads",
        common=True,
    )


def run(argv: Sequence[str]) -> int:
    options = parse(DoctorOptions, argv, prog="proa doctor", summary=SUMMARY, epilog=EPILOG).options
    # Imported here, as --help does not need them.
    from proa.cli.checks import Examined, findings
    from proa.machine.machine_file import FORMAT, MachineFile, machine_json
    from proa.machine.probe import probe

    machine, measured = probe(), Examined()
    found = list(findings(machine, measured))
    healthy = all(f.status != "broken" for f in found)
    if options.json:
        file = MachineFile(
            format=FORMAT, healthy=healthy, findings=tuple(found), machine=machine, kernels=measured.kernels,
            rates=measured.rates,
        )  # fmt: skip
        write_out(machine_json(file))
    else:
        _print(found)
    return 0 if healthy else 1


def _print(found: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in found:
        detail = Text(finding.detail, overflow="fold")
        if finding.remedy:
            detail.append(f"\n{finding.remedy}", style="bold")
        table.add_row(Text(finding.status, style=_STYLE[finding.status]), Text(finding.name), detail)
    console_out().print(table)
