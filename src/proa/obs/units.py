"""Formats bytes, rates, durations and counts for display."""

from __future__ import annotations

import math
from collections.abc import Iterable

_STEPS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Format a size: 1536 -> "1.50 KiB"; powers of 1024, three significant digits."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    size = float(count)
    for unit in _STEPS:
        size /= 1024
        if abs(size) < 1023.5 or unit == _STEPS[-1]:
            break
    return f"{size:.{_decimals(size)}f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Format a bandwidth in decimal units, as data sheets give it: 2.56e10 -> "25.6 GB/s"."""
    size, unit = bytes_per_s / 1e9, "GB/s"
    if abs(size) < 1:
        size, unit = bytes_per_s / 1e6, "MB/s"
    return f"{size:.{_decimals(size)}f} {unit}"


def format_flops(per_s: float) -> str:
    """Format floating-point operations per second: 8.11e11 -> "811 GFLOP/s"."""
    size, unit = (per_s / 1e12, "TFLOP/s") if per_s >= 999.5e9 else (per_s / 1e9, "GFLOP/s")
    return f"{size:.{_decimals(size)}f} {unit}"


def format_duration(seconds: float) -> str:
    """Format a duration: 0.0124 -> "12 ms", 3.21 -> "3.2 s", 75 -> "1 min 15 s", 7500 -> "2 h 5 min"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_ms(seconds: float) -> str:
    """Format a short duration in ms with three significant digits: 0.0124 -> "12.4 ms"."""
    ms = 1e3 * seconds
    return f"{ms:.{_decimals(ms)}f} ms"


def format_count(count: int) -> str:
    """Format a number of parameters or tokens in powers of 1000: 134515008 -> "135M"."""
    size = float(count)
    for unit in ("", "K", "M", "B"):
        if abs(size) < 999.5 or unit == "B":
            break
        size /= 1000
    return f"{size:.{_decimals(size) if unit else 0}f}{unit}"


def _decimals(size: float) -> int:
    return 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending integers as ranges: "0-3, 8, 10-11"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
