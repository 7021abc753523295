"""`proa doctor`: runs the checks of cli/checks.py and prints them as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proa.config.field import option
from proa.config.parse import parse
from proa.obs.console import console_out, write_out

if TYPE_CHECKING:
    from proa.cli.checks import Finding

SUMMARY = "check this machine and suggest remedies for problems"
EPILOG = "The exit code is 1 if a check is broken, else 0."
_STYLE = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True)
class DoctorOptions:
    """options"""

    json: bool = option(False, help="print JSON: {healthy, findings, machine}", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(DoctorOptions, argv, prog="proa doctor", summary=SUMMARY, epilog=EPILOG).options
    # Imported here, as --help does not need them.
    import msgspec

    from proa.cli.checks import findings
    from proa.machine.probe import probe

    machine = probe()
    found = list(findings(machine))
    healthy = all(f.status != "broken" for f in found)
    if options.json:
        content = {"healthy": healthy, "findings": found, "machine": machine}
        write_out(json.dumps(msgspec.to_builtins(content), indent=2) + "\n")
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
