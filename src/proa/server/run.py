"""The life of a server process: bind the port, load the model in the background, serve, drain, exit.

The port opens before the model is loaded. The first SIGTERM or SIGINT drains: new requests get 503, running requests
have --drain-seconds to finish, the rest are aborted with an error, and the exit code is 0. A second signal exits
immediately with exit code 1. If the model cannot be loaded or the engine dies, running requests get an error, /health
gives the reason, and the process exits with the error's exit code, so that a supervisor can restart it. An engine that
dies is restarted first (engine/processes/restarting.py), unless the server runs with --no-restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from proa.config.options import ServerOptions
from proa.engine.ipc import Loading
from proa.errors import EngineDead, ProaError
from proa.llm import AsyncLLM
from proa.server.access import tls_context
from proa.server.app import build_app
from proa.server.connections import (
    ACCEPT_BATCH,
    HEAD_S,
    Connection,
    OpenConnections,
    raise_descriptor_limit,
)
from proa.server.listen import LISTEN_BACKLOG, url_of
from proa.server.precheck import Precheck
from proa.server.service import Service
from proa.server.welcome import welcome
from proa.types import ProgressCallback

log = logging.getLogger(__name__)

Launch = Callable[[ProgressCallback], Awaitable[AsyncLLM]]  # returns while the engine is still loading

ERROR_RESPONSES_S = 2.0  # for error responses to reach their clients before the process exits
ENGINE_STOP_S = 1.0  # for the engine to stop after a second signal
_KEEP_ALIVE_S = 75  # for idle connections; longer than common clients and proxies keep them in their pools
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Shutdown requests: the first drains, the second exits immediately. Use it on one event loop only."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.immediate = asyncio.Event()

    def request(self) -> None:
        (self.immediate if self.requested.is_set() else self.requested).set()


async def serve_on(
    listener: socket.socket,
    launch: Launch,
    model: str,
    options: ServerOptions,
    announce: Callable[[str], None],
    shutdown: Shutdown,
) -> int:
    """Serve `model` on a socket from `bind` until a signal or `shutdown`; return the exit code.

    `launch` finds the model and starts its engine. `announce` receives lines for the terminal: "listening on URL" at
    once, then, when the model is ready, how to call it. Raises the error that ended loading or the engine.
    """
    service, url = Service(options, model), url_of(listener, options.scheme)
    server = _Server(_uvicorn_config(service), tls_context(options))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    announce(f"listening on {url}")

    def announce_ready() -> None:
        announce(welcome(url, service.model_name, options))

    model_task = asyncio.create_task(_load_and_watch(service, launch, announce_ready))
    requested = asyncio.create_task(shutdown.requested.wait())
    with _signals_request(shutdown):
        try:
            await asyncio.wait((http, model_task, requested), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
            if model_task.done():
                await _report_failure(service, model_task)
            await _drain(service, shutdown)
        finally:
            for task in (model_task, requested):
                task.cancel()
            await asyncio.gather(model_task, requested, return_exceptions=True)
            await _shut_down(service, server, http, shutdown)
    return 1 if shutdown.immediate.is_set() else 0


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


class _Server(uvicorn.Server):
    """uvicorn with the deadlines and limits of `connections`, and without its signal handlers, which would close the
    port instead of answering 503; `serve_on` has its own."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        opened = OpenConnections(raise_descriptor_limit())
        self.servers = [
            await asyncio.get_running_loop().create_server(
                lambda: Connection(self.config, self.server_state, opened),
                sock=listener,
                ssl=self._tls,
                backlog=ACCEPT_BATCH,
                ssl_handshake_timeout=HEAD_S if self._tls else None,
            )
            for listener in sockets
        ]
        for listener in sockets:
            listener.listen(LISTEN_BACKLOG)  # create_server has lowered it to the batch
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals_request(shutdown: Shutdown) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, shutdown.request)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _load_and_watch(service: Service, launch: Launch, when_ready: Callable[[], None]) -> None:
    """Load the model, then watch its engine. Never returns; raises the error that ended loading or the engine."""
    service.llm = await launch(_progress_into(service))
    if service.llm.source is not None:
        service.precheck = Precheck(service.llm.source)
    await service.llm.engine.wait_ready()
    gc.collect()
    gc.freeze()  # modules, tokenizer and app are never freed: a full collection took 45 ms to scan them
    when_ready()
    await service.llm.engine.wait_ended()
    raise service.llm.engine.failure or EngineDead("The engine stopped by itself.", "Restart the server.")


def _progress_into(service: Service) -> ProgressCallback:
    """Return a progress function that stores search and download progress in `service`, with an ETA from the phase's
    mean rate."""
    began: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - began.setdefault(phase, time.monotonic())
        eta_s = elapsed_s * (total - done) / done if done and elapsed_s > 1 else None
        service.progress = Loading(phase, done, total, eta_s)

    return report


async def _report_failure(service: Service, model_task: asyncio.Task[None]) -> None:
    """Record the fatal error, let running requests receive their error responses, then raise it."""
    try:
        model_task.result()
    except ProaError as error:
        service.failure = error
        await _until_idle(service, ERROR_RESPONSES_S)
        raise


async def _drain(service: Service, shutdown: Shutdown) -> None:
    service.draining.set()
    if service.in_flight:
        log.info("Draining: %d request(s) may finish within %g s.", service.in_flight, service.options.drain_seconds)
    await _unless_second_signal(shutdown, _until_idle(service, service.options.drain_seconds))


async def _unless_second_signal(shutdown: Shutdown, work: Coroutine[Any, Any, None], grace_s: float = 0.0) -> None:
    """Await `work`, but cancel it `grace_s` after a second signal. Raises what `work` raises."""
    working = asyncio.create_task(work)
    second_signal = asyncio.create_task(shutdown.immediate.wait())
    try:
        await asyncio.wait((working, second_signal), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and grace_s:
            await asyncio.wait((working,), timeout=grace_s)
        if working.done():
            working.result()
    finally:
        working.cancel()
        second_signal.cancel()
        await asyncio.gather(working, second_signal, return_exceptions=True)


async def _until_idle(service: Service, at_most_s: float) -> None:
    end_s = time.monotonic() + at_most_s
    while service.in_flight and time.monotonic() < end_s:
        await asyncio.sleep(0.02)


async def _shut_down(service: Service, server: _Server, http: asyncio.Task[None], shutdown: Shutdown) -> None:
    """Stop the engine (aborting running requests), let their error responses go out, stop the HTTP server."""
    service.draining.set()
    if service.precheck is not None:
        service.precheck.close()
    if service.llm is not None:
        await _unless_second_signal(shutdown, service.llm.close(), ENGINE_STOP_S)
    await _unless_second_signal(shutdown, _until_idle(service, ERROR_RESPONSES_S))
    server.should_exit, server.force_exit = True, shutdown.immediate.is_set()
    await asyncio.gather(http, return_exceptions=True)
