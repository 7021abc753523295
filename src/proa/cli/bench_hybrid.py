"""`proa bench hybrid`: options and output; bench/hybrid.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Group

from proa.bench.hybrid import HybridOptions
from proa.bench.hybrid import run as measure
from proa.bench.hybrid_table import render_beside, render_drift, render_hybrid
from proa.bench.result import Result
from proa.cli.bench_output import print_each
from proa.config.field import option
from proa.config.parse import parse

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
    print_each(partial(measure, options.bench), _rendered, as_json=options.json)
    return 0


def _rendered(results: Sequence[Result]) -> Group:
    tables = {"hybrid": render_hybrid, "hybrid-drift": render_drift, "hybrid-beside": render_beside}
    return tables[results[0].bench](results)
