"""Formats the results of `proa bench prefill` as a table. Never: figures that are not in the JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from proa.bench.result import Result
from proa.bench.table import framed, number, numbers_table
from proa.obs.units import format_bytes, format_rate

_COLUMNS = (
    "tokens", "first token ms", "first prompt ms", "plan ms", "tokens/s", "bound ms", "% of it", "PCIe ms", "FLOPs ms",
    "streamed %", "idle %", "prediction %",
)  # fmt: skip
_LEGEND = (
    "first prompt: of this length, before any warm-up; plan: predicted as by `proa plan`; bound: no division of the "
    "experts in RAM can be faster at the rates of this run, the GPU's own work included; PCIe: all copied once; "
    "FLOPs: all operations at the rate of a large product; streamed: experts in RAM that were copied; idle: of the "
    "time, the GPU computed nothing; prediction: measured over predicted time of the passes, less 1."
)


def render_prefill(results: Sequence[Result]) -> Group:
    """Format one row per length. `results` must not be empty."""
    table = numbers_table(_COLUMNS)
    for found in results:
        table.add_row(*_row(found.figures))
    last = results[-1].figures
    upload, in_service = (_rate(last[name]) for name in ("upload_bytes_per_s", "copy_bytes_per_s"))
    ring, peak, vram = (format_bytes(last[n] or 0) for n in ("ring_bytes", "vram_peak_bytes", "vram_planned_bytes"))
    rates = (
        f"upload {upload}, in service {in_service}; the CPU: {number(last['cpu_expert_us'])} us per expert and "
        f"{number(last['cpu_pair_us'])} us per token of it; ring {ring}; "
        f"VRAM {'unknown' if last['vram_peak_bytes'] is None else peak} of {vram} planned"
    )
    return framed(results, table, Text(rates), Text(_LEGEND))


def _rate(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else format_rate(bytes_per_s)


def _row(figures: dict[str, float | None]) -> list[str]:
    def scaled(name: str, factor: float) -> str:
        value = figures[name]
        return number(None if value is None else factor * value)

    return [
        scaled("tokens", 1), scaled("ttft_s", 1e3), scaled("first_ttft_s", 1e3), scaled("predicted_ttft_s", 1e3),
        scaled("tokens_per_s", 1), scaled("bound_s", 1e3), scaled("bound_share", 100), scaled("pcie_s", 1e3),
        scaled("flops_s", 1e3), scaled("streamed_share", 100), scaled("gpu_idle_share", 100),
        scaled("prediction_error", 100),
    ]  # fmt: skip
