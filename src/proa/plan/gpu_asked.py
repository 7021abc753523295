"""What --gpu, --gpu-experts and --gpu-resident-layers say, read. Never: machines, models' sizes, decisions."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from proa.config.options import GpuOptions
from proa.config.value import parse_size
from proa.errors import UsageError
from proa.obs.units import format_bytes
from proa.types import Decision

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class AskedGpu:
    """`index` belongs to "index", the rest to "sim"."""

    kind: Literal["auto", "none", "index", "sim"]
    index: int = 0
    sim_bytes: int = 0
    pcie_bytes_per_s: float | None = None  # None: copies are not throttled

    @property
    def explicit(self) -> bool:
        """One certain GPU: what keeps it from being used is an error."""
        return self.kind in ("index", "sim")


def asked_gpu(text: str) -> AskedGpu:
    """Of "auto", "none", "1", "sim:512MiB" or "sim:512MiB,pcie=8GB/s". Raises UsageError."""
    if text == "auto":
        return AskedGpu("auto")
    if text == "none":
        return AskedGpu("none")
    if text.isascii() and text.isdigit():
        return AskedGpu("index", int(text))
    if not text.startswith("sim:"):
        raise _wrong("gpu", text, "auto, none, a GPU's number, or a simulated one such as sim:512MiB,pcie=8GB/s")
    size, comma, link = text.removeprefix("sim:").partition(",")
    try:
        sim_bytes, rate = parse_size(size), _rate(link) if comma else None
    except ValueError:
        sim_bytes, rate = 0, None
    if sim_bytes <= 0 or (rate is not None and rate <= 0):
        raise _wrong("gpu", text, "a size and perhaps the rate of its link: sim:512MiB, or sim:512MiB,pcie=8GB/s")
    return AskedGpu("sim", 0, sim_bytes, rate)


def unused_rows(asked: GpuOptions) -> tuple[Decision, ...]:
    """What was asked about a GPU, where none is used; but for whether there shall be one, and what is counted."""
    given = {f.name: getattr(asked, f.name) for f in fields(asked) if getattr(asked, f.name) != f.default}
    return tuple(
        Decision(f"--{name.replace('_', '-')}", _shown(value), "none", "no GPU is used")
        for name, value in given.items()
        if name not in ("gpu", "save_expert_counts") and value != "none"
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return format_bytes(value) if isinstance(value, int) else str(value)


def asked_experts(text: str) -> int | Literal["auto", "all"]:
    """Of "auto", "all", "none" (0) or a number. Raises UsageError."""
    if text == "auto":
        return "auto"
    if text == "all":
        return "all"
    if text == "none":
        return 0
    if text.isascii() and text.isdigit():
        return int(text)
    raise _wrong("gpu_experts", text, "auto, all, none or a number")


def asked_layers(text: str | None, num_layers: int) -> frozenset[int]:
    """Numbers of layers of "0-5,9". Raises UsageError."""
    found: set[int] = set()
    for part in text.split(",") if text is not None else ():
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise _wrong("gpu_resident_layers", text or "", "numbers of layers and spans of them, such as 0-5,9")
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high >= num_layers:
            raise _wrong("gpu_resident_layers", text or "", f"layers from 0 to {num_layers - 1}, spans upwards")
        found.update(range(low, high + 1))
    return frozenset(found)


def _rate(link: str) -> float:
    """Bytes/s of "pcie=8GB/s". Raises ValueError."""
    if not link.startswith("pcie=") or not link.endswith("/s"):
        raise ValueError(link)
    return float(parse_size(link.removeprefix("pcie=").removesuffix("/s")))


def _wrong(param: str, text: str, takes: str) -> UsageError:
    return UsageError(f"--{param.replace('_', '-')} is {text!r}.", f"It takes {takes}.", param=param)
