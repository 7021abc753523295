"""Formats a benchmark's result as tables. Never: figures that are not in the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proa.bench.result import Result
from proa.obs.units import format_bytes, format_rate

_STATISTICS = ("median", "p10", "p90", "p99")


def render(result: Result) -> Group:
    """Format times with their percentiles, then rates, errors and notes, then machine, version and options."""
    return framed(
        [result],
        *([_times(result)] if any("_ms_" in name for name in result.figures) else []),
        _figures(result),
        *(Text(f"failed {count} times: {message}", style="red") for message, count in result.errors.items()),
    )


def framed(results: Sequence[Result], *parts: RenderableType) -> Group:
    """Format `parts` between the question that the results answer, and their notes, machine, version and options.
    `results` must not be empty."""
    first = results[0]
    notes = dict.fromkeys(note for result in results for note in result.notes)
    return Group(
        Text(f"{first.question} {first.model}", style="bold"),
        *parts,
        *note_lines(notes),
        Text(_origin(first), style="dim"),
    )


def note_lines(notes: Iterable[str]) -> list[Text]:
    return [Text(f"note: {note}") for note in notes]


def _times(result: Result) -> Table:
    """Format one row per figure with percentiles over requests, in milliseconds."""
    table = numbers_table(("milliseconds", *_STATISTICS))
    table.columns[0].justify = "left"
    for name in result.figures:
        what, is_time, _ = name.partition("_ms_median")
        if is_time:
            values = (result.figures[f"{what}_ms_{statistic}"] for statistic in _STATISTICS)
            table.add_row(what, *map(number, values))
    return table


def _figures(result: Result) -> Table:
    table = facts_table()
    for name, value in result.figures.items():
        if "_ms_" not in name:
            table.add_row(*_words(name, value))
    roof = result.roof
    if roof is not None:
        speed, readings = format_rate(roof.bandwidth_bytes_per_s), roof.readings_bytes_per_s
        spread = f"{format_rate(min(readings))} to {format_rate(max(readings))} before and after the runs"
        table.add_row("roof", f"{format_bytes(roof.bytes_per_token)} per token, RAM reads {speed} ({spread})")
        for vram in chain.from_iterable(roof.vram):
            read_bytes = format_bytes(vram.dense_bytes_per_token + vram.expert_bytes_per_token)
            rate = format_rate(vram.bandwidth_bytes_per_s)
            table.add_row("", f"{read_bytes} per token, VRAM reads {rate} ({vram.source})")
    return table


def _words(name: str, value: float | None) -> tuple[str, str]:
    """Format a figure's name and value: ("decode_tokens_per_s", 12.3) -> ("decode tokens", "12.3 / s")."""
    for ending, unit in (("_us_per_step", " us / step"), ("_per_s", " / s"), ("_s", " s"), ("_share", " %")):
        if name.endswith(ending) and value is not None:
            shown = number(100 * value if unit == " %" else value)
            return name.removesuffix("" if unit == " %" else ending).replace("_", " "), shown + unit
    return name.replace("_", " "), number(value)


def number(value: float | None) -> str:
    """Format a number with three significant digits; integers without a decimal point; None as "unknown"."""
    if value is None:
        return "unknown"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _origin(result: Result) -> str:
    """Format the machine, version, date and options of a result."""
    machine, options = result.machine, ", ".join(f"{name} {value}" for name, value in result.options.items())
    made = made_by(result.version, result.commit, result.date)
    return f"{machine.cpu}, {machine.usable_cores} cores; {made}; {options}"


def made_by(version: str, commit: str | None, date: str) -> str:
    return f"proa {version}" + (f" ({commit})" if commit else "") + f"; {date}"


def numbers_table(columns: Iterable[str]) -> Table:
    """A table of right-aligned columns. On a narrow terminal cells take several lines: a number that is cut off would
    read as another one."""
    table = Table(*columns, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in table.columns:
        column.justify, column.overflow = "right", "fold"
    return table


def facts_table() -> Table:
    """A table of names and values, without a head."""
    return Table(box=None, show_header=False, pad_edge=False)
