"""Formats the results of `proa bench hybrid` as tables. Never: figures that are not in the JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from proa.bench.result import Result
from proa.bench.table import facts_table, framed, number, numbers_table
from proa.obs.units import format_bytes, format_rate

_DRIFT_COLUMNS = ("requests", "tokens since", "tokens/s", "hits %", "LRU hits %", "best fixed %", "moved per step")
_BESIDE_COLUMNS = {
    "requests": "requests",
    "first token s": "ttft_s",
    "prompt tokens/s": "prompt_tokens_per_s",
    "alone": "prompt_tokens_per_s_alone",
    "gap before ms": "gap_ms_before",
    "limit ms": "gap_ms_limit",
    "meanwhile ms": "gap_ms_beside",
    "p99 ms": "gap_ms_p99",
    "longest ms": "gap_ms_longest",
    "tokens/s before": "tokens_per_s_before",
    "meanwhile": "tokens_per_s_beside",
}
_COLUMNS = (
    "requests",
    "tokens/s",
    "per request",
    "roof",
    "% of it",
    "roof as placed",
    "% of it",
    "ms per step",
    "CPU",
    "transport",
    "GPU",
    "host",
)
_DEFERRED_COLUMNS = ("deferred", "its ms")
_PARTS = ("cpu_experts_ms", "transport_ms", "gpu_ms", "host_ms")
_LEGEND = (
    "CPU: time of its expert jobs, measured; transport: an empty round trip per job; host: time outside of the model, "
    "measured; GPU: the rest of a step. GPU work that overlaps with CPU jobs counts as CPU."
)

_DEFERRED_LEGEND = (
    " deferred: --deferred-experts, lossy; its ms: time of deferred experts, while the GPU goes on, not part of CPU."
)


def render_hybrid(results: Sequence[Result]) -> Group:
    """Format one row per number of requests, then the bytes read and the bandwidths. `results` must not be empty."""
    paired = any(result.figures["deferred_experts"] for result in results)
    table = numbers_table((*_COLUMNS, *_DEFERRED_COLUMNS) if paired else _COLUMNS)
    for result in results:
        table.add_row(*_row(result), *(_deferred(result) if paired else ()))
    return framed(results, table, _facts(results), Text(_LEGEND + (_DEFERRED_LEGEND if paired else "")))


def render_drift(results: Sequence[Result]) -> Group:
    """Format one row per window of tokens and number of requests. `results` must not be empty."""
    table = numbers_table(_DRIFT_COLUMNS)
    for result in results:
        figures = result.figures
        names = [name.removeprefix("hit_rate_") for name in figures if name.startswith("hit_rate_")]
        for name in names:
            shares = (figures[f"{of}hit_rate_{name}"] for of in ("", "lru_", "best_"))
            table.add_row(
                number(figures["requests"]),
                name.removeprefix("at_"),
                number(figures[f"tokens_per_s_{name}"]),
                *(number(None if share is None else 100 * share) for share in shares),
                format_bytes(figures[f"moved_bytes_per_step_{name}"] or 0),
            )
    good = ", ".join(number(result.figures["tokens_until_good"]) for result in results)
    return framed(results, table, Text(f"tokens until hits reach 90 % of an LRU cache's: {good}"))


def render_beside(results: Sequence[Result]) -> Group:
    """Format one row per number of requests. `results` must not be empty."""
    table = numbers_table(_BESIDE_COLUMNS)
    first = results[0].figures
    shared = first["gap_ms_limit"] is None
    for result in results:
        figures = [number(result.figures[name]) for name in _BESIDE_COLUMNS.values()]
        table.add_row(*("none" if shared and figure == "unknown" else figure for figure in figures))
    how = "chunked prefill in the steps of decode" if shared else "a few layers at a time between decode steps"
    about = f"prompt of {number(first['prompt_tokens'])} tokens; {how}. Gap: time between two tokens."
    return framed(results, table, Text(about))


def _row(result: Result) -> list[str]:
    figures = result.figures
    shown = ("requests", "tokens_per_s", "tokens_per_s_per_request", "roof_tokens_per_s")
    roof, placed = figures["roof_share"], figures["roof_as_placed_share"]
    return [
        *(number(figures[name]) for name in shown),
        number(None if roof is None else 100 * roof),
        number(figures["roof_as_placed_tokens_per_s"]),
        number(None if placed is None else 100 * placed),
        number(figures["step_ms"]),
        *(number(result.split[part]) for part in _PARTS),
    ]


def _deferred(result: Result) -> tuple[str, str]:
    return number(result.figures["deferred_experts"]), number(result.figures["cpu_deferred_ms"])


def _facts(results: Sequence[Result]) -> Table:
    table = facts_table()
    first = results[0].figures
    table.add_row("experts in VRAM", f"{100 * (first['resident_share'] or 0):.0f} %")
    for result in results:
        figures = result.figures
        parts = {"dense and KV": "dense", "experts in VRAM": "resident", "experts of the CPU": "cpu"}
        read = ", ".join(f"{text} {format_bytes(figures[f'{n}_bytes_per_step'] or 0)}" for text, n in parts.items())
        late = f", deferred: {number(figures['deferred_experts'])}" if figures["deferred_experts"] else ""
        table.add_row(f"read per step (requests: {number(figures['requests'])}{late})", read)
    hits = [(r.figures["hit_rate"], r.figures["best_hit_rate"]) for r in results]
    if all(rate is not None for pair in hits for rate in pair):
        shown = ", ".join(f"{100 * (got or 0):.0f} % of {100 * (best or 0):.0f} %" for got, best in hits)
        table.add_row("hits in VRAM", f"{shown} possible with the best fixed set of experts")
    if all(r.figures["foreseen_share"] is not None for r in results):
        shares = ", ".join(f"{100 * (r.figures['foreseen_share'] or 0):.0f} %" for r in results)
        table.add_row("predicted", f"{shares} of the CPU's experts, whose weights idle workers prefetched")
    for text, name in (("VRAM", "hbm"), ("RAM", "ram"), ("link to the GPU", "pcie")):
        rates = [rate for r in results if (rate := r.figures[f"{name}_bytes_per_s"]) is not None]
        table.add_row(text, format_rate(max(rates)) if rates else "unknown")
    table.add_row("empty round trip", f"{number(first['round_trip_us'])} us")
    for text, name, meaning in (
        ("a layer without experts", "fixed_us_per_layer", "from a layer's CPU experts to the next layer's"),
        ("with head and host", "beside_us_per_layer", "step time without CPU experts / layers"),
    ):
        if first[name] is not None:
            each = ", ".join(number(r.figures[name]) for r in results)
            table.add_row(text, f"{each} us: {meaning}")
    return table
