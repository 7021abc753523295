"""`proa bench prefill`: options and output; bench/prefill.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from proa.bench.prefill import PrefillOptions
from proa.bench.prefill import run as measure
from proa.bench.prefill_table import render_prefill
from proa.cli.bench_output import print_each
from proa.config.field import option
from proa.config.parse import parse

SUMMARY = "prompts with experts on a GPU and in RAM: time to first token by length, the bound, what was streamed"


@dataclass(frozen=True)
class PrefillCommand:
    """options"""

    bench: PrefillOptions = field(default_factory=PrefillOptions)
    json: bool = option(False, help="print one JSON object per length, as soon as it is measured", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(PrefillCommand, argv, prog="proa bench prefill", summary=SUMMARY).options
    print_each(partial(measure, options.bench), render_prefill, as_json=options.json)
    return 0
