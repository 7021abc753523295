"""Writes log lines from a thread: a pipe that is full because its reader stalls does not stop the server."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from contextlib import suppress

MOST_LINES = 10_000  # that wait to be written; later ones are dropped and counted
_GATHER_S = 0.02  # from one write to the next: waking the thread for each of many lines took 5 % of a server's time
_FLUSH_S = 1.0  # the longest that the end of the process waits for a reader


class LogWriter(logging.Handler):
    """Formats records where they are logged and writes their lines to a file descriptor from a daemon thread.

    Once MOST_LINES wait, further lines are dropped; a line says how many when writing goes on. Lines reach `os.write`
    without Python's buffers, whose locks a stalled thread would hold at the end of the process.
    """

    def __init__(self, descriptor: int, most_lines: int = MOST_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(most_lines)
        self._dropped = 0  # guarded by the handler's lock
        threading.Thread(target=self._write_lines, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - no log call may fail, whatever its arguments' __str__ raises
            self.handleError(record)
            return
        if self._dropped and not self._lines.full():
            line = f"({self._dropped} log lines were dropped: nothing read them.)\n{line}"
            self._dropped = 0
        try:
            self._lines.put_nowait(f"{line}\n".encode(errors="backslashreplace"))
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most one second."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)

    def _write_lines(self) -> None:
        written_s = -_GATHER_S
        while True:
            lines = [self._lines.get()]
            time.sleep(max(written_s + _GATHER_S - time.monotonic(), 0))
            with suppress(queue.Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            data = b"".join(lines)
            with suppress(OSError):  # the reader has closed its end
                while data:
                    data = data[os.write(self._descriptor, data) :]
            written_s = time.monotonic()
            for _ in lines:
                self._lines.task_done()
