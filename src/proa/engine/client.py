"""The frontend's side of an engine process. Belongs here: spawning, messages, what its death means. Never: HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from proa.config.env import child_environ
from proa.engine.handle import EngineState
from proa.engine.ipc import (
    Abort,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stats,
    Submit,
    ToEngine,
    Tokens,
)
from proa.errors import EngineDead, ProaError, UsageError, error_from_wire
from proa.plan.plan import Plan
from proa.types import EngineRequest, TokenEvent

CLOSE_SECONDS = 5.0
LONGEST_ENDPOINT = 100  # the system allows a socket's path about 107 bytes
RECONNECT_MS = 10  # how often to look whether the engine listens yet
LAST_WORDS_SECONDS = 0.5  # a dying engine's Failed message may still be on its way when its exit is seen


class EngineClient:
    """An engine process and the conversation with it (an EngineHandle)."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self.state: EngineState = "loading"
        self.loading: Loading | None = None
        self.failure: ProaError | None = None
        self.stats = Stats()
        self._process = process
        self._socket = socket
        self._folder = folder
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, asyncio.Queue[TokenEvent | ProaError]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @classmethod
    async def launch(cls, plan: Plan) -> EngineClient:
        """Start the process and return at once; it loads meanwhile."""
        folder = Path(tempfile.mkdtemp(prefix="proa-"))  # mode 0700: nobody else can connect
        endpoint = f"ipc://{folder}/engine"
        if len(endpoint) > LONGEST_ENDPOINT:
            folder.rmdir()
            raise UsageError(
                f"The temporary folder {folder.parent} has too long a name for a socket.",
                "Set TMPDIR to a shorter one.",
            )
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # sending never blocks, not even to an engine that has died
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.connect(endpoint)  # the engine binds: what is sent before it does is kept for it
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "proa.engine.worker", endpoint),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=child_environ(),
        )
        client = cls(process, socket, folder)
        await client._send(Start(plan))
        return client

    async def wait_ready(self) -> Ready:
        return await asyncio.shield(self._ready)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """See EngineHandle.generate."""
        if self.failure is not None:
            raise self.failure.again()
        if self.state == "stopped":
            raise EngineDead("The engine was stopped.")
        events: asyncio.Queue[TokenEvent | ProaError] = asyncio.Queue()
        self._streams[request.id] = events
        done = False
        try:
            await self._send(Submit(request))
            while not done:
                event = await events.get()
                done = isinstance(event, ProaError) or event.finish is not None
                if isinstance(event, ProaError):
                    raise event
                yield event
        finally:
            del self._streams[request.id]
            if not done:
                await self._send(Abort([request.id]))

    async def close(self) -> None:
        if self.state != "stopped":
            self._end("stopped", EngineDead("The engine was stopped."), finish=True)
            if self._process.returncode is None:
                await self._send(Shutdown())
                try:
                    await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
                except TimeoutError:
                    self._process.kill()
                    await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(self._encoder.encode(message))

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        first = await self._socket.recv()
        shutil.rmtree(self._folder, ignore_errors=True)  # connected: no crash can leave the socket's path behind
        self._handle(decoder.decode(first))
        while True:
            await asyncio.sleep(0)  # who waits for these events sees them with their own stats, whatever waits behind
            self._handle(decoder.decode(await self._socket.recv()))

    def _handle(self, message: FromEngine) -> None:
        if self.state in ("failed", "stopped"):
            return
        match message:
            case Tokens(events, stats):
                self.stats = stats
                for event in events:
                    if event.id in self._streams:
                        self._streams[event.id].put_nowait(event)
            case Stats():
                self.stats = message
            case Refused(request_id):
                if request_id in self._streams:
                    error = error_from_wire(message.error, message.message, message.remedy, message.param)
                    self._streams[request_id].put_nowait(error)
            case Loading():
                self.loading = message
            case Ready():
                self.state = "ready"
                self._ready.set_result(message)
            case Failed():
                self._end("failed", error_from_wire(message.error, message.message, message.remedy))

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if self.state in ("loading", "ready"):
            self._end("failed", EngineDead(*_obituary(code)))

    def _end(self, state: EngineState, failure: ProaError, finish: bool = False) -> None:
        """Nothing more will come: tell everybody who waits."""
        self.state, self.failure = state, failure
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # asked for once, so that nobody waiting is not an error
        for request_id, events in self._streams.items():
            events.put_nowait(TokenEvent(id=request_id, finish="abort") if finish else failure.again())


def _obituary(code: int) -> tuple[str, str]:
    """What an exit code means, and what to do."""
    if code >= 0:
        return f"The engine process ended with exit code {code}.", "Its last words stand above in the log."
    name = f"signal {-code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    remedy = "Restart the server."
    if -code == signal.SIGKILL:
        remedy = "If the system ran out of memory (see dmesg), lower --context or set --ram, then restart."
    return f"The engine process was killed by {name}.", remedy
