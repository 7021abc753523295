"""`proa bench serve`: options and output; starts a server unless --url is given; bench/serve.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.bench.asked import need_context
from proa.bench.predicted import planned
from proa.bench.result import Result
from proa.bench.serve import ServeBenchOptions
from proa.bench.serve import run as measure
from proa.cli.bench_output import print_result, refuse_engine_options
from proa.cli.server_process import server_process
from proa.config.field import option
from proa.config.parse import parse, to_argv
from proa.obs.console import console_err
from proa.obs.progress import show_progress
from proa.plan.prepare import prepare

SUMMARY = "many concurrent requests over HTTP: throughput and latency"


@dataclass(frozen=True)
class ServeBenchCommand:
    """options"""

    bench: ServeBenchOptions = field(default_factory=ServeBenchOptions)
    json: bool = option(False, help="print the result as JSON", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(ServeBenchCommand, argv, prog="proa bench serve", summary=SUMMARY).options
    refuse_engine_options(options.bench.url, options.bench.engine)
    return print_result(_measure(options.bench), as_json=options.json)


def _measure(bench: ServeBenchOptions) -> Result:
    if bench.url is not None:
        return measure(bench, bench.url)
    with show_progress(console_err()) as show:
        prepared = prepare(bench.model, bench.engine, show)
    need_context(prepared.plan, {"input_tokens": bench.input_tokens, "output_tokens": bench.output_tokens})
    beside = planned(prepared, bench.engine)  # while the server does not have the memory
    with server_process([bench.model, "--port=0", *to_argv(bench.engine)]) as report:
        return measure(bench, report["url"], beside)
