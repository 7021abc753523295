"""`proa bench latency`: options and output; bench/latency.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.bench.latency import LatencyOptions
from proa.bench.latency import run as measure
from proa.cli.bench_output import print_result, refuse_engine_options
from proa.config.field import option
from proa.config.parse import parse

SUMMARY = "one request at a time: time to first token, time per token, tokens/s compared with the roof"


@dataclass(frozen=True)
class LatencyCommand:
    """options"""

    bench: LatencyOptions = field(default_factory=LatencyOptions)
    json: bool = option(False, help="print the result as JSON", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(LatencyCommand, argv, prog="proa bench latency", summary=SUMMARY).options
    refuse_engine_options(options.bench.url, options.bench.engine)
    return print_result(measure(options.bench), as_json=options.json)
