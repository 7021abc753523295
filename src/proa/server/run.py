"""A server from its socket to its exit code: bind, load in the background, serve, drain. Never: routes, printing.

The port opens at once. The first SIGTERM or SIGINT drains: new requests get 503, running ones may finish for
--drain-seconds, the rest is cut off with an error, the exit code is 0. A second signal exits at once. When the
model cannot be loaded or the engine dies, running requests get their errors, /health says why, and the process
ends with the error's exit code, so that a supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from proa.config.options import ServerOptions
from proa.engine.ipc import Loading
from proa.errors import EngineDead, ProaError, ResourceError, UsageError
from proa.llm import AsyncLLM
from proa.server.app import build_app
from proa.server.service import Service
from proa.server.welcome import welcome

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (phase, done, total)
Launch = Callable[[Progress], Awaitable[AsyncLLM]]  # returns while the engine loads

LAST_ANSWERS_S = 2.0  # for errors to reach their clients before the process ends
AT_ONCE_S = 1.0  # for the engine to stop after a second signal
_KEEP_ALIVE_S = 75  # idle connections; longer than the pools of common clients and proxies
_WATCH_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """The wish to stop: asked once, drain; asked twice, exit at once. Belongs to one event loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ResourceError when the port cannot be had, UsageError
    for an address that is not this machine's."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"{host!r} is no address to listen on: {error.strerror}.", "Use --host 127.0.0.1.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> ProaError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(
            f"Port {port} on {host} is in use by another program.",
            f"Choose another with --port {port + 1 if port < 65535 else 8000}, let the system choose with --port 0, "
            f"or see who has it: ss -ltnp 'sport = :{port}'.",
        )
    if error.errno == errno.EACCES:
        return ResourceError(f"Port {port} is reserved for root.", "Choose one above 1023 with --port.")
    return UsageError(f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another with --host.")


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds it: loopback if it listens everywhere."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_on(
    listener: socket.socket,
    launch: Launch,
    model: str,
    options: ServerOptions,
    announce: Callable[[str], None],
    stop: Stop,
) -> int:
    """Serve `model` on a socket from `bind` until a signal or `stop` ends it; return the exit code.

    `launch` finds and starts the model; `announce` gets the lines for people: "listening on URL" at once, then
    how to call the model when it is ready. Raises whatever ended loading or the engine.
    """
    service, url = Service(options, model), url_of(listener)
    server = _Server(_uvicorn_config(service))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    announce(f"listening on {url}")
    life = asyncio.create_task(_live(service, launch, lambda: announce(welcome(url, service.model_name, options))))
    asked = asyncio.create_task(stop.asked.wait())
    with _signals_ask(stop):
        try:
            await asyncio.wait((http, life, asked), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
            if life.done():
                await _mourn(service, life)
            await _drain(service, stop)
        finally:
            for task in (life, asked):
                task.cancel()
            await asyncio.gather(life, asked, return_exceptions=True)
            await _end(service, server, http, stop)
    return 1 if stop.at_once.is_set() else 0


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
    """Leaves the signals to `serve_on`: uvicorn's own handling closes the port instead of answering 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals_ask(stop: Stop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.ask)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _live(service: Service, launch: Launch, when_ready: Callable[[], None]) -> None:
    """Load the model, then watch it. Returns never; raises what ended it."""
    service.llm = await launch(_progress_into(service))
    await service.llm.engine.wait_ready()
    when_ready()
    while service.llm.engine.state == "ready":
        await asyncio.sleep(_WATCH_S)
    raise service.llm.engine.failure or EngineDead("The engine stopped by itself.", "Restart the server.")


def _progress_into(service: Service) -> Progress:
    """Reports of search and download as Loading, with an ETA from the rate since the phase began."""
    began: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - began.setdefault(phase, time.monotonic())
        eta_s = elapsed_s * (total - done) / done if done and elapsed_s > 1 else None
        service.progress = Loading(phase, done, total, eta_s)

    return report


async def _mourn(service: Service, life: asyncio.Task[None]) -> None:
    """Let running requests get their errors, then raise what ended the model's life."""
    try:
        life.result()
    except ProaError as error:
        service.failure = error
        await _until_idle(service, LAST_ANSWERS_S)
        raise


async def _drain(service: Service, stop: Stop) -> None:
    service.draining.set()
    if service.in_flight:
        log.info("Draining: %d request(s) may finish within %g s.", service.in_flight, service.options.drain_seconds)
    await _unless_hurried(stop, _until_idle(service, service.options.drain_seconds))


async def _unless_hurried(stop: Stop, work: Coroutine[Any, Any, None], grace_s: float = 0.0) -> None:
    """`work`, which is cancelled `grace_s` after a second signal. Raises what it raises."""
    working = asyncio.create_task(work)
    hurried = asyncio.create_task(stop.at_once.wait())
    try:
        await asyncio.wait((working, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and grace_s:
            await asyncio.wait((working,), timeout=grace_s)
        if working.done():
            working.result()
    finally:
        working.cancel()
        hurried.cancel()
        await asyncio.gather(working, hurried, return_exceptions=True)


async def _until_idle(service: Service, at_most_s: float) -> None:
    end_s = time.monotonic() + at_most_s
    while service.in_flight and time.monotonic() < end_s:
        await asyncio.sleep(0.02)


async def _end(service: Service, server: _Server, http: asyncio.Task[None], stop: Stop) -> None:
    """Stop the engine (which ends what still runs), let clients hear of it, stop the HTTP server."""
    service.draining.set()
    if service.llm is not None:
        await _unless_hurried(stop, service.llm.close(), AT_ONCE_S)
    await _unless_hurried(stop, _until_idle(service, LAST_ANSWERS_S))
    server.should_exit, server.force_exit = True, stop.at_once.is_set()
    await asyncio.gather(http, return_exceptions=True)
