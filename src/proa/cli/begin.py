"""The first second of a server's start: opens the model's headers and the port, plans, and begins the engine's process.
Imports no HTTP library, which takes a second: a bad model or port is refused before. start.py does the rest."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from proa.config.options import ServeOptions
from proa.engine.processes.early import EarlyProcess
from proa.plan.opened import open_if_here
from proa.plan.prepare import Prepared, prepare, with_paths
from proa.server.listen import bind


@dataclass(frozen=True)
class Begun:
    """A start whose port is open. prepared: the plan; None if the model must be downloaded or built first."""

    listener: socket.socket
    early: EarlyProcess
    prepared: Prepared | None


@contextlib.contextmanager
def begin(model: str, options: ServeOptions) -> Iterator[Begun]:
    """Open the model and the port, and plan. The engine's process begins as soon as RAM has been measured; the end of
    the block kills it if no engine uses it. Raises ProaError."""
    with_paths(options.engine)  # a path that cannot be used is refused before the port is open
    opened = open_if_here(model, options.engine.model)
    with contextlib.closing(bind(options.server.host, options.server.port)) as listener, EarlyProcess() as early:
        prepared = None
        if opened is not None:
            prepared = prepare(model, options.engine, opened=opened, when_measured=early.begin)
        yield Begun(listener, early, prepared)
