"""Runs of `proa check` in this process, restricted to some paths. Never: tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import proa.check.run
from proa.check.paths import NoPath, paths
from proa.check.paths import Path as OnePath
from proa.check.run import Report, check
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords

SIM = "sim:256MiB"
FASTEST = "CPU, fastest"  # stands for the first path on the CPU: the one whose prefixes are restored from tiers
BUSY_S = 600.0  # a limit for machines that run other tests meanwhile


def checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, only: str = "", gpu: str = "none", seed: int = 1,
    number: int | None = None, most_bytes: int | None = None, limit_s: float = BUSY_S, **options: Any,
) -> Report:  # fmt: skip
    """only: a path is run if this is a part of its name; or FASTEST. number: of these paths only one, the number-th; a
    model with fewer paths counts them again from the first."""

    def some(*args: Any) -> list[Any]:
        every = paths(*args)
        on_cpu = next(path.name for path in every if isinstance(path, OnePath) and path.name.startswith("CPU, "))
        name = on_cpu if only == FASTEST else only
        ours = [path.name for path in every if isinstance(path, OnePath) and name in path.name]
        if number is not None:
            ours = [ours[number % len(ours)]]
        return [path for path in every if isinstance(path, NoPath) or path.name in ours]

    monkeypatch.setattr(proa.check.run, "paths", some)
    asked = from_keywords(EngineOptions, **{"dtype": "bfloat16", "gpu": gpu, **options})
    more = {} if most_bytes is None else {"most_bytes": most_bytes}
    return check(str(folder), asked, seed, lambda phase, done, total: None, limit_s=limit_s, **more)


def said(report: Report) -> list[str]:
    """The first problem of every path that has any."""
    return [str(path.problems[0]) for path in report.observed if path.problems]


def found(report: Report) -> list[str]:
    """All problems, and failures of paths."""
    problems = [f"{path.name}: {problem}" for path in report.observed for problem in path.problems]
    return problems + [f"{failed.name}: {failed.why}" for failed in report.failed]
