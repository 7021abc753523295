"""Parsing of --gpu, --gpu-experts and --gpu-resident-layers. Never: machines, models' sizes, decisions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from proa.config.options import GpuOptions
from proa.config.parse import given_options
from proa.config.value import parse_size
from proa.errors import UsageError
from proa.types import Decision

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class AskedGpu:
    """The value of --gpu. index: for kind "index"; the other fields: for kind "sim"."""

    kind: Literal["auto", "none", "index", "sim"]
    index: int = 0
    sim_bytes: int = 0
    pcie_bytes_per_s: float | None = None  # None: copies are not throttled

    @property
    def explicit(self) -> bool:
        """True if a specific GPU was asked for: an obstacle is an error then, not a reason to use the CPU."""
        return self.kind in ("index", "sim")


def asked_gpu(text: str) -> AskedGpu:
    """Parse "auto", "none", "1", "sim:512MiB" or "sim:512MiB,pcie=8GB/s". Raises UsageError."""
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
        raise _wrong("gpu", text, "sim: with a size and optionally a PCIe rate: sim:512MiB or sim:512MiB,pcie=8GB/s")
    return AskedGpu("sim", 0, sim_bytes, rate)


def unused_rows(asked: GpuOptions) -> tuple[Decision, ...]:
    """Rows for GPU options that were given but have no effect, since no GPU is used. --gpu and --save-expert-counts
    have rows of their own."""
    return tuple(
        Decision(f"--{given.name.replace('_', '-')}", given.value, "none", "no GPU is used")
        for given in given_options(asked)
        if given.name not in ("gpu", "save_expert_counts") and given.value != "none"
    )


def asked_experts(text: str) -> int | Literal["auto", "all"]:
    """Parse "auto", "all", "none" (0) or a number. Raises UsageError."""
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
    """Parse layer numbers such as "0-5,9". Raises UsageError."""
    found: set[int] = set()
    for part in text.split(",") if text is not None else ():
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise _wrong("gpu_resident_layers", text or "", "layer numbers and ranges, such as 0-5,9")
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high >= num_layers:
            raise _wrong("gpu_resident_layers", text or "", f"layers from 0 to {num_layers - 1}, in ascending ranges")
        found.update(range(low, high + 1))
    return frozenset(found)


def _rate(link: str) -> float:
    """Parse "pcie=8GB/s" to bytes/s. Raises ValueError."""
    if not link.startswith("pcie=") or not link.endswith("/s"):
        raise ValueError(link)
    return float(parse_size(link.removeprefix("pcie=").removesuffix("/s")))


def _wrong(param: str, text: str, expected: str) -> UsageError:
    return UsageError(f"--{param.replace('_', '-')} is {text!r}.", f"Give {expected}.", param=param)
