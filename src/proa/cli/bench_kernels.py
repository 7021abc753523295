"""`proa bench kernels`: options and output; bench/kernels.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from proa.bench.kernel_plan import KernelOptions
from proa.bench.kernel_table import render_cells, render_start
from proa.bench.kernels import KernelBench, open_bench
from proa.config.field import option
from proa.config.parse import parse
from proa.obs.console import console_out, write_out

SUMMARY = "expert kernels of the CPU: time, GB/s and GFLOP/s, compared with the limits of memory and arithmetic"


@dataclass(frozen=True)
class KernelsCommand:
    """options"""

    bench: KernelOptions = field(default_factory=KernelOptions)
    json: bool = option(
        False, help="print one JSON object per cell (format, shape, tokens), as soon as it is measured", common=True
    )


def run(argv: Sequence[str]) -> int:
    options = parse(KernelsCommand, argv, prog="proa bench kernels", summary=SUMMARY).options
    with open_bench(options.bench) as bench:
        if options.json:
            for cell in bench.cells():
                write_out(cell.json() + "\n")
        else:
            _print_tables(bench)
    return 0


def _print_tables(bench: KernelBench) -> None:
    console = console_out()
    console.print(render_start(bench.run, bench.pool.isa, bench.meter.start))
    for _, cells in groupby(bench.cells(), key=lambda cell: (cell.shape, cell.format)):
        console.print(render_cells(list(cells)))
