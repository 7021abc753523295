"""`proa bench load`: options and output; bench/load.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.bench.load import LoadOptions
from proa.bench.load import run as measure
from proa.cli.bench_output import print_result
from proa.config.field import option
from proa.config.parse import parse

SUMMARY = "loading a model whose files are in the page cache: GB/s, GB/s per thread, peak memory"


@dataclass(frozen=True)
class LoadCommand:
    """options"""

    bench: LoadOptions = field(default_factory=LoadOptions)
    json: bool = option(False, help="print the result as JSON", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(LoadCommand, argv, prog="proa bench load", summary=SUMMARY).options
    return print_result(measure(options.bench), as_json=options.json)
