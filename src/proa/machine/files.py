"""Read the small text files of /proc and /sys. Never: knowledge of what they mean."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str | None:
    """The text without surrounding blanks; None if it is missing or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """One whole number; None if it is missing or says something else ("max")."""
    text = read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def size(text: str) -> int:
    """ "512K", "32M" or plain bytes, as /sys writes cache sizes."""
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)


def cpu_list(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8)."""
    spans = (part.split("-") for part in text.replace("\n", ",").split(",") if part.strip())
    return tuple(sorted({cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}))


def table(text: str) -> dict[str, str]:
    """Lines "key : value" -> dict; the first of equal keys wins."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def kib(value: str) -> int:
    """ "123 kB" -> bytes."""
    return int(value.split()[0]) * 1024
