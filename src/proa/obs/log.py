"""Configures logging, once per process."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

from proa.obs.console import console_err

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(level: str, console: Console | None = None) -> None:
    """Log to stderr: Proa's records from `level` up, other libraries' from warning up (with "debug", all).

    A terminal gets rich's handler on `console`, so that log lines and progress bars do not overwrite each other; a file
    or pipe gets plain lines.
    """
    console = console or console_err()
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=level == "debug", rich_tracebacks=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="%H:%M:%S"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_PLAIN))
    logging.basicConfig(level="DEBUG" if level == "debug" else "WARNING", handlers=[handler], force=True)
    logging.getLogger("proa").setLevel(level.upper())
