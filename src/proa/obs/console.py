"""Writes to stdout and stderr; no other module does. Answers and JSON go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 110  # width of tables in a file or pipe, which have no width of their own


def write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def write_err(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def console_err() -> Console:
    """Return the console for tables, notes and progress, on stderr; `is_terminal` is False for a file or pipe."""
    from rich.console import Console  # imported here, as `proa --help` does not need it

    return Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_COLUMNS, highlight=False)


def console_out() -> Console:
    """Return the console for tables that are a command's result, on stdout."""
    from rich.console import Console  # imported here, as `proa --help` does not need it

    class ResultConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # Rich's own exits with 1, which means "no" or "broken" in some commands

    return ResultConsole(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
