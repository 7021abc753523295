"""Functions shared by the benchmarks' commands: an option check, and printing the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.console import RenderableType

from proa.bench.result import Result
from proa.bench.table import render
from proa.config.options import EngineOptions
from proa.config.parse import given_options
from proa.errors import UsageError
from proa.obs.console import console_out, write_out


def refuse_engine_options(url: str | None, engine: EngineOptions) -> None:
    """Raise UsageError if engine options are given with --url: they would have no effect on a running server."""
    given = given_options(engine)
    if url is not None and given:
        names = ", ".join("--" + option.name.replace("_", "-") for option in given)
        raise UsageError(
            f"{names} has no effect on the running server at {url}.",
            "Leave out --url, or start the server with these options.",
        )


def print_each(
    measure: Callable[[Callable[[Result], None]], None], render: Callable[[Sequence[Result]], RenderableType], *,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the results that `measure` reports: one JSON object per line, as they come, or one table at the end, also
    if an error or Ctrl-C ends it."""
    if as_json:
        measure(lambda found: write_out(msgspec.json.encode(found).decode() + "\n"))
        return
    results: list[Result] = []
    try:
        measure(results.append)
    finally:
        if results:
            console_out().print(render(results))


def print_result(result: Result, *, as_json: bool) -> int:
    """Print the result to stdout; return the exit code: 1 if requests failed, else 0."""
    if as_json:
        write_out(result.json() + "\n")
    else:
        console_out().print(render(result))
    return 1 if result.errors else 0
