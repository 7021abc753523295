"""Formats the cells of `proa bench kernels` as tables. Never: figures that are not in the JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from proa.bench.kernel_ceilings import Ceilings
from proa.bench.kernels import Cell, RunFacts
from proa.bench.table import facts_table, made_by, note_lines, number, numbers_table
from proa.obs.units import format_bytes

_COLUMNS = ("tokens", "us", "predicted us", "GB/s", "GFLOP/s", "bound", "of the roof", "RAM GB/s before, after")


def render_start(run: RunFacts, isa: str, ceilings: Ceilings) -> Group:
    """Format the machine and its measured limits."""
    table = facts_table()
    rates = ", ".join(f"{rate:.1f} with {count}" for count, rate in ceilings.read_gbytes_per_s.items())
    table.add_row("kernels", f"{isa} ({run.isa_reason})" if run.isa_reason else isa)
    table.add_row("threads", str(run.threads))
    table.add_row("RAM reads", f"{rates} threads, GB/s")
    table.add_row("arithmetic", f"{ceilings.peak_gflops:.0f} GFLOP/s on registers only")
    table.add_row(
        "empty dispatch",
        f"{ceilings.dispatch_us:.2f} us; {ceilings.rendezvous_us:.2f} us if every thread must run a task",
    )
    origin = f"{run.cpu}; {made_by(run.version, run.commit, run.date)}"
    return Group(table, *note_lines(run.notes), Text(origin, style="dim"), Text())


def render_cells(cells: Sequence[Cell]) -> Group:
    """Format the cells of one weight format and shape."""
    first = cells[0]
    title = (
        f"{first.format}, {first.shape}: {first.experts} experts of {first.hidden} x {first.width}, top {first.top_k}"
    )
    layers = "1 layer" if first.layers == 1 else f"{first.layers} layers"
    memory = f"{format_bytes(first.weights_bytes)} in {layers} on {first.pages} pages"
    table = numbers_table(_COLUMNS)
    for cell in cells:
        reads = f"{cell.before.read_gbytes_per_s:.1f}, {cell.after.read_gbytes_per_s:.1f}"
        share = Text(f"{100 * cell.roof_share:.1f} %", style="bold")
        table.add_row(
            str(cell.tokens),
            number(cell.us),
            number(cell.predicted_us),
            number(cell.gbytes_per_s),
            number(cell.gflops),
            cell.bound,
            share,
            reads,
        )
    return Group(Text(title, style="bold"), Text(memory, style="dim"), *note_lines(first.notes), table)
