"""`proa bench hybrid`: options and output; bench/hybrid.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from proa.bench.hybrid import HybridOptions
from proa.bench.hybrid import run as measure
from proa.bench.hybrid_table import render_beside, render_drift, render_hybrid
from proa.bench.result import Result
from proa.config.field import option
from proa.config.parse import parse
from proa.obs.console import console_out, write_out

SUMMARY = "decode with experts on a GPU and the CPU: tokens/s by number of requests, where the time goes, the roof"


@dataclass(frozen=True)
class HybridCommand:
    """options"""

    bench: HybridOptions = field(default_factory=HybridOptions)
    json: bool = option(
        False, help="print one JSON object per number of requests, as soon as it is measured", common=True
    )


def run(argv: Sequence[str]) -> int:
    options = parse(HybridCommand, argv, prog="proa bench hybrid", summary=SUMMARY).options
    if options.json:
        measure(options.bench, lambda found: write_out(msgspec.json.encode(found).decode() + "\n"))
        return 0
    results: list[Result] = []
    measure(options.bench, results.append)
    tables = {"hybrid": render_hybrid, "hybrid-drift": render_drift, "hybrid-beside": render_beside}
    console_out().print(tables[results[0].bench](results))
    return 0
