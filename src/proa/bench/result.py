"""What every bench hands back: one JSON shape. Never: measuring the model, layout (table.py).

Figures carry their unit in the name (ttft_ms_median, decode_tokens_per_s); shares are fractions of 1.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from proa.config.field import declarations, values_of
from proa.config.value import to_text
from proa.machine.machine import Machine
from proa.machine.probe import probe
from proa.obs.version import proa_version
from proa.plan.plan import Roof, VramRoof


class MeasuredRoof(msgspec.Struct, frozen=True, kw_only=True):
    """RAM reading speed beside the timed runs, and what decode of one request must read per token."""

    bytes_per_token: int  # from RAM
    vram: VramRoof | None = None
    bandwidth_bytes_per_s: float  # the median of what limited each run: see Readings
    readings_bytes_per_s: tuple[float, ...]  # before, between and after the runs

    @property
    def tokens_per_s(self) -> float:
        rate = self.bandwidth_bytes_per_s
        return Roof(bytes_per_token=self.bytes_per_token, bandwidth_bytes_per_s=rate, vram=self.vram).tokens_per_s


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One bench, reproducible from what it says. None in figures means: not known here."""

    bench: str
    question: str
    model: str
    figures: dict[str, float | None]
    split: dict[str, float] = {}  # of a step's time, where the bench asks for it
    roof: MeasuredRoof | None = None
    errors: dict[str, int] = {}  # message -> how many requests ended with it
    notes: tuple[str, ...] = ()
    options: dict[str, str]  # the bench's, and those of the engine that were asked
    machine: Machine
    version: str
    commit: str | None
    date: str  # UTC, ISO 8601

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def result(
    bench: str, question: str, model: str, options: Any, figures: Mapping[str, float | None], **more: Any
) -> Result:
    """A Result of now, on this machine, by this version.

    `options` is the bench's group; `more` may be split, roof, errors and notes.
    """
    return Result(
        bench=bench,
        question=question,
        model=model,
        figures=dict(figures),
        options=_options(options),
        machine=probe(),
        version=proa_version(),
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    )


def _options(group: Any) -> dict[str, str]:
    """The bench's own options, and those of the engine that were asked; as people read them, secrets hidden."""
    declared = declarations(type(group))
    return {
        name: to_text(declared[name], value)
        for name, value in values_of(group).items()
        if value is not None and (not declared[name].path or value != declared[name].default)
    }


def commit() -> str | None:
    """The checkout's commit, "-dirty" with changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a checkout too slow to ask
        return None
    return done.stdout.strip() or None
