"""What the benchmarks' commands share. Never: measuring."""

from __future__ import annotations

from proa.bench.result import Result
from proa.bench.table import render
from proa.config.options import EngineOptions
from proa.config.parse import asked
from proa.errors import UsageError
from proa.obs.console import console_out, write_out


def refuse_idle_options(url: str | None, engine: EngineOptions) -> None:
    """Options of an engine that is not ours would do nothing. Raises UsageError."""
    given = asked(engine)
    if url is not None and given:
        names = ", ".join("--" + option.name.replace("_", "-") for option in given)
        raise UsageError(f"{names} cannot change the server at {url}.", "Leave out --url, or start it with them.")


def print_result(result: Result, *, as_json: bool) -> int:
    """To stdout; the exit code is 1 if some requests failed."""
    if as_json:
        write_out(result.json() + "\n")
    else:
        console_out().print(render(result))
    return 1 if result.errors else 0
