"""The frontend's side of an engine process: its messages, its exit code. Never: HTTP, spawning it (process.py)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator

import msgspec

from proa.engine.ipc import (
    Abort,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
)
from proa.engine.processes.aside import Aside
from proa.engine.processes.handle import EngineState
from proa.engine.processes.mailbox import Mailbox, joined
from proa.engine.processes.process import EngineProcess
from proa.engine.processes.wire import FrontendEnd
from proa.engine.stats import Stats
from proa.errors import EngineDead, ProaError, error_from_wire
from proa.grammar.vocabulary import Vocabulary
from proa.plan.plan import Plan
from proa.types import EngineRequest, TokenEvent

CLOSE_SECONDS = 5.0
# The signals of faults, for which the engine process prints its stacks (faulthandler).
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
LAST_MESSAGE_SECONDS = 0.5  # wait after the process exits: its Failed message may still be in the socket


class EngineClient:
    """An EngineHandle whose engine is a child process."""

    def __init__(
        self, process: EngineProcess, end: FrontendEnd, own_thread: bool = False, *, joins: bool = False
    ) -> None:
        self.state: EngineState = "loading"
        self.loading: Loading | None = None
        self.failure: ProaError | None = None
        self.stats = Stats()
        self._process = process
        self._ended = asyncio.Event()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, Mailbox] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._end, self._own_thread, self._aside = end, own_thread, Aside()
        end.take, end.takes_all, self._joins = self._take, joins, joins
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def launch(
        cls, plan: Plan, *, own_thread: bool = False, joins: bool = False, process: EngineProcess | None = None
    ) -> EngineClient:
        """Send the plan to `process`, by default a new one, and return without waiting for the model.

        process: this client's from now on; if it has ended already, the state becomes "failed". own_thread: the event
        loop's thread belongs to this client alone, so its CPU affinity may be changed while requests run (see Aside).
        joins: a request's events of several steps that wait are yielded as one, so that a frontend which is slower than
        the engine keeps up; otherwise each step's events are yielded while `stats` are those of the same step.
        """
        process = process or EngineProcess()
        try:
            _, end = await asyncio.get_running_loop().create_unix_connection(FrontendEnd, sock=process.socket)
        except BaseException:
            process.end()
            raise
        client = cls(process, end, own_thread, joins=joins)
        client._send(Start(plan))
        return client

    async def wait_ready(self) -> Ready:
        return await asyncio.shield(self._ready)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """See EngineHandle.generate."""
        if self.failure is not None:
            raise self.failure.again()
        if self.state == "stopped":
            raise EngineDead("The engine was stopped.")
        mailbox = self._streams[request.id] = Mailbox()
        done = False
        try:
            self._aside.listen()
            self._send(Submit(request))
            while not done:
                events = await mailbox.take()
                for event in joined(events) if self._joins and len(events) > 1 else events:
                    done = isinstance(event, ProaError) or event.finish is not None
                    if isinstance(event, ProaError):
                        raise event
                    yield event
        finally:
            del self._streams[request.id]
            if not self._streams:
                self._aside.rest()
            if not done:
                self._send(Abort([request.id]))

    def learn(self, vocabulary: Vocabulary) -> None:
        self._send(vocabulary)

    async def close(self) -> None:
        if self.state == "loading":
            self._process.close_stdin()  # ends it at once: there is nothing to finish
        if self.state != "stopped":
            self._stop("stopped", EngineDead("The engine was stopped."), finish=True)
            if self._process.returncode is None:
                self._send(Shutdown())
                try:
                    await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
                except TimeoutError:
                    self._process.kill()
                    await self._process.wait()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._process.close_stdin()
        self._end.close()

    def _send(self, message: ToEngine) -> None:
        self._end.send(self._encoder.encode(message))

    def _take(self, frame: bytes) -> None:
        self._handle(self._decoder.decode(frame))

    def _handle(self, message: FromEngine) -> None:
        if self.state in ("failed", "stopped"):
            return
        match message:
            case Tokens(events, stats):
                self.stats = stats
                for event in events:
                    if event.id in self._streams:
                        self._streams[event.id].put(event)
            case Stats():
                self.stats = message
            case Refused(request_id):
                if request_id in self._streams:
                    error = error_from_wire(message.error, message.message, message.remedy, message.param)
                    self._streams[request_id].put(error)
            case Loading():
                self.loading = message
            case Ready():
                self.state = "ready"
                if self._own_thread:
                    self._aside.cpus = message.caller_cpus
                self._ready.set_result(message)
            case Failed():
                self._stop("failed", error_from_wire(message.error, message.message, message.remedy))

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(LAST_MESSAGE_SECONDS)
        if self.state in ("loading", "ready"):
            self._stop("failed", EngineDead(*_explain_exit(code)))

    def _stop(self, state: EngineState, failure: ProaError, finish: bool = False) -> None:
        """End all streams and wait_ready() with `failure`; finish: end streams with an "abort" event instead."""
        self.state, self.failure = state, failure
        self._ended.set()
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # marks it as retrieved: asyncio logs no error if wait_ready() was never called
        for request_id, mailbox in self._streams.items():
            mailbox.put(TokenEvent(id=request_id, finish="abort") if finish else failure.again())


def _explain_exit(code: int) -> tuple[str, str]:
    """Message and remedy for the engine process's exit code."""
    if code >= 0:
        return f"The engine process ended with exit code {code}.", "See its last lines in the log above."
    name = f"signal {-code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    if -code in CRASHES:
        return f"The engine process crashed: {name}.", "Report it with the stacks that it printed to standard error."
    remedy = "Restart the server."
    if -code == signal.SIGKILL:
        remedy = "If the system ran out of memory (see dmesg), lower --context or set --ram, then restart."
    return f"The engine process was killed by {name}.", remedy
