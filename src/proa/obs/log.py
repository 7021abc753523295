"""Configures logging, once per process."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

from proa.obs.log_writer import LogWriter

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

REPEAT_S = 10.0  # a line that comes again within this time is counted
_MOST_LINES = 1000  # remembered at once


class Repeats(logging.Filter):
    """Drops lines that were logged less than REPEAT_S ago; the next one that is logged says how many there were."""

    def __init__(self) -> None:
        super().__init__()
        # By line: the time of the last one logged, and the number dropped since.
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = (record.name, record.getMessage())
        logged_s, dropped = self._seen.get(line, (-REPEAT_S, 0))
        if record.created - logged_s < REPEAT_S:
            self._seen[line] = (logged_s, dropped + 1)
            return False
        self._seen.pop(line, None)
        if len(self._seen) >= _MOST_LINES:
            self._seen.pop(next(iter(self._seen)))
        self._seen[line] = (record.created, 0)
        if dropped:
            record.msg, record.args = f"{line[1]} ({dropped} more like this since)", ()
        return True


def setup_logging(level: str, console: Console) -> None:
    """Log to stderr: Proa's records from `level` up, other libraries' from warning up (with "debug", all).

    A terminal gets rich's handler on `console`, so that log lines and progress bars do not overwrite each other; a file
    or pipe gets plain lines.
    """
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=level == "debug", rich_tracebacks=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="%H:%M:%S"))
    else:
        handler = LogWriter(console.file.fileno())
        handler.setFormatter(logging.Formatter(_PLAIN))
    handler.addFilter(Repeats())
    logging.basicConfig(level="DEBUG" if level == "debug" else "WARNING", handlers=[handler], force=True)
    logging.getLogger("proa").setLevel(level.upper())
