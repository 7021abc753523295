"""The result of a benchmark, with its JSON form, common to all benchmarks.

Names of figures include the unit (ttft_ms_median, decode_tokens_per_s); shares are fractions of 1.
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
    """The roof of decode of one request: bytes read per token, and the RAM bandwidth measured during the benchmark."""

    bytes_per_token: int  # from RAM
    vram: tuple[tuple[VramRoof, ...], ...] = ()  # of each stage's ranks
    bandwidth_bytes_per_s: float  # median over the runs: see RamReadings.typical
    readings_bytes_per_s: tuple[float, ...]  # all readings: before, between and after the runs

    @property
    def tokens_per_s(self) -> float:
        rate = self.bandwidth_bytes_per_s
        return Roof(bytes_per_token=self.bytes_per_token, bandwidth_bytes_per_s=rate, vram=self.vram).tokens_per_s


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one benchmark, with all that is needed to reproduce it. A figure of None is unknown."""

    bench: str
    question: str
    model: str
    figures: dict[str, float | None]
    split: dict[str, float] = {}  # parts of a step's time, in benchmarks that measure them
    roof: MeasuredRoof | None = None
    errors: dict[str, int] = {}  # error message -> number of requests that failed with it
    notes: tuple[str, ...] = ()
    options: dict[str, str]  # the benchmark's options, and non-default engine options
    machine: Machine
    version: str
    commit: str | None
    date: str  # UTC, ISO 8601

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def result(
    bench: str, question: str, model: str, options: Any, figures: Mapping[str, float | None], **more: Any
) -> Result:
    """Make a Result with the current date, this machine and this version.

    options: the benchmark's option group; more: split, roof, errors, notes.
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
    """Format the benchmark's own options and the non-default engine options; secrets are hidden."""
    declared = declarations(type(group))
    return {
        name: to_text(declared[name], value)
        for name, value in values_of(group).items()
        if value is not None and (not declared[name].path or value != declared[name].default)
    }


def commit() -> str | None:
    """Return the checkout's commit, with "-dirty" if it has changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or too slow
        return None
    return done.stdout.strip() or None
