"""The first second of a server's start, before its HTTP libraries are imported: what can be refused is refused, and the
engine's process begins. Never: the rest of the start (start.py)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from proa.config.options import ServeOptions
from proa.engine.processes.early import EarlyProcess
from proa.plan.opened import open_if_here
from proa.plan.prepare import Prepared, prepare
from proa.server.listen import bind


@dataclass(frozen=True)
class Begun:
    """A start whose port is open. prepared: the plan, if the model is here; then the engine's process has begun."""

    listener: socket.socket
    early: EarlyProcess
    prepared: Prepared | None


@contextlib.contextmanager
def begin(model: str, options: ServeOptions) -> Iterator[Begun]:
    """Open the model and the port, and plan; the engine's process begins as soon as RAM has been measured, and the end
    of the block ends it if no engine has taken it. Raises ProaError."""
    opened = open_if_here(model, options.engine.model)
    with contextlib.closing(bind(options.server.host, options.server.port)) as listener, EarlyProcess() as early:
        prepared = None
        if opened is not None:
            prepared = prepare(model, options.engine, opened=opened, when_measured=early.begin)
        yield Begun(listener, early, prepared)
