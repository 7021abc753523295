"""The rates of a plan's devices, with their sources. Never: measuring them."""

from __future__ import annotations

import msgspec


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of the machine, per second, and where it is from; None: unknown, and not counted."""

    per_s: float | None
    source: str


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that predictions use: bytes/s, and floating-point operations/s."""

    ram: Speed
    cpu: Speed
    vram: Speed | None = None  # None: no GPU is used
    pcie: Speed | None = None
    gpu: Speed | None = None
