"""`proa bench restart`: options and output; starts and kills servers; bench/restart.py measures."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from proa.bench.restart import RestartOptions
from proa.bench.restart import run as measure
from proa.bench.result import Result
from proa.cli.bench_output import print_result
from proa.cli.server_process import server_process
from proa.config.field import option
from proa.config.parse import parse, to_argv
from proa.errors import UsageError

SUMMARY = "kill a server and start it again: its prefix cache is restored from files"
DISK_BYTES = 64 << 30  # of a temporary folder


@dataclass(frozen=True)
class RestartCommand:
    """options"""

    bench: RestartOptions = field(default_factory=RestartOptions)
    json: bool = option(False, help="print the result as JSON", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(RestartCommand, argv, prog="proa bench restart", summary=SUMMARY).options
    return print_result(_measure(options.bench), as_json=options.json)


def _folder(within: str | None) -> tempfile.TemporaryDirectory[str]:
    """An empty folder inside `within`, which is created, or in the temporary folder. Raises UsageError."""
    try:
        if within is not None:
            Path(within).mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="proa-", dir=within)
    except OSError as error:
        where = within or tempfile.gettempdir()
        raise UsageError(
            f"No folder can be made in {where}: {error.strerror}.", "Give one with --prefix-cache-dir PATH.",
            param="prefix_cache_dir",
        ) from error  # fmt: skip


def _measure(bench: RestartOptions) -> Result:
    """Measure in an empty folder, inside --prefix-cache-dir if that is given."""
    asked = bench.engine.cache
    with ExitStack() as stack:
        made = stack.enter_context(_folder(asked.prefix_cache_dir))
        disk = asked.prefix_cache_disk or DISK_BYTES
        cache = replace(asked, prefix_cache_dir=made, prefix_cache_disk=disk)
        start = partial(server_process, [bench.model, "--port=0", *to_argv(replace(bench.engine, cache=cache))])
        return measure(bench, Path(made), start, partial(start, kill=True))
