"""The only place that writes to stdout and stderr. Answers and JSON go to stdout, all else to stderr.
Never: what is written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 110  # a log file has no width; tables should not break in it


def write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def write_err(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def console_err() -> Console:
    """For tables, notes and progress; knows whether a person watches (`is_terminal`)."""
    from rich.console import Console  # `proa --help` starts without it

    return Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_COLUMNS, highlight=False)


def console_out() -> Console:
    """For tables that are the answer to what was asked."""
    from rich.console import Console  # `proa --help` starts without it

    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
