"""Reads and parses the small text files of /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def read_text(path: Path) -> str | None:
    """Read a file, stripped of surrounding whitespace; None if it is missing or unreadable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Read a file that contains one integer; None if it is missing or contains something else ("max")."""
    text = read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def parse_cache_size(text: str) -> int:
    """Parse a cache size of /sys to bytes: "512K", "32M" or plain bytes."""
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a CPU list: "0-3,8" -> (0, 1, 2, 3, 8)."""
    spans = (part.split("-") for part in text.replace("\n", ",").split(",") if part.strip())
    return tuple(sorted({cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}))


def parse_key_values(text: str) -> dict[str, str]:
    """Parse lines "key : value"; of duplicate keys the first counts."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def parse_kib(value: str) -> int:
    """Parse a size of /proc/meminfo to bytes: "123 kB" -> 125952."""
    return int(value.split()[0]) * 1024


def cpu_name(cpuinfo: Mapping[str, str]) -> str:
    """The processor's name. cpuinfo: /proc/cpuinfo, parsed."""
    return cpuinfo.get("model name") or cpuinfo.get("CPU part") or "unknown"
