"""An engine process that begins before there is a plan. Never: when planning leaves the CPUs to it (plan/prepare.py).

The process takes seconds to import torch, the frontend a second or more to import its HTTP server, plan and load the
tokenizer: both at the same time make a start that much shorter (docs/decisions/053).
"""

from __future__ import annotations

import threading
from types import TracebackType

from proa.engine.processes.process import EngineProcess


class EarlyProcess:
    """Begins a process on request and hands it to the engine's client. `with EarlyProcess() as early:` ends the process
    if none has taken it, so that a start that is refused leaves none behind.

    Any thread may call `begin`, also after the block has ended: then it does nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._is_open = True

    def begin(self) -> None:
        """Begin the process, if it has not begun."""
        with self._lock:
            if self._is_open and self._process is None:
                self._process = EngineProcess()

    def take(self) -> EngineProcess:
        """Return the process, which is the caller's to end from now on; begin it if it has not begun. Once."""
        with self._lock:
            process, self._process, self._is_open = self._process, None, False
        return process or EngineProcess()

    def __enter__(self) -> EarlyProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            process, self._process, self._is_open = self._process, None, False
        if process is not None:
            process.end()
