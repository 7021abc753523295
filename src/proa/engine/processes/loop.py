"""The engine process: its message loop. Never: maths, starting and ending the process (worker.py)."""

from __future__ import annotations

import logging
import os

import torch

from proa.engine.building.load import load_engine
from proa.engine.building.timeline import Timeline
from proa.engine.engine import Engine
from proa.engine.executors.clock import Stage
from proa.engine.ipc import (
    PROTOCOL,
    Abort,
    Failed,
    Refused,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Tokens,
)
from proa.engine.processes.admission import Admission
from proa.engine.processes.channel import Channel
from proa.errors import EngineDead, ProaError
from proa.grammar.store import GrammarStore
from proa.grammar.vocabulary import Vocabulary

log = logging.getLogger(__name__)

# An idle engine waits for a message at most this long before it polls again.
IDLE_POLL_MS = 10_000
POLL_MS = 1  # while it waits for a grammar that is compiled, or for KV pages that are copied
# An engine that was idle this long checks its pages. With the 10^5 pages of a small model on a GPU of 80 GB that takes
# 10 to 20 ms, for which a request that came at once waited.
CHECK_AFTER_MS = 1000


def run(channel: Channel) -> int:
    """Load what Start asks for, then serve until Shutdown. Returns the exit code. Raises EOFError: see Channel."""
    timeline = Timeline()
    timeline.mark("imports")
    cpus = os.sched_getaffinity(0)  # before the engine's thread is bound to one CPU
    grammars = GrammarStore(cpus)
    start = channel.receive()
    timeline.mark("plan")  # the frontend may still be planning
    if not isinstance(start, Start) or start.protocol != PROTOCOL:
        channel.send(Failed("EngineDead", f"Frontend and engine speak different protocols (engine: {PROTOCOL})."))
        return 1
    loaded = False
    try:
        engine, ready = load_engine(start.plan, channel.send, timeline, cpus)
        loaded = True
        if engine.helpers is not None:
            channel.send_by(engine.helpers)
        channel.send(ready)
        serve(Admission(engine, grammars), engine, channel)
    except ProaError as error:
        failure = EngineDead(f"The engine failed: {error.message}", error.remedy) if loaded else error
        if loaded:
            log.error("%s", failure)
        channel.send(Failed(type(failure).__name__, failure.message, failure.remedy))
        return failure.exit_code
    except torch.OutOfMemoryError as error:
        log.exception("The GPU ran out of memory.")
        channel.send(Failed("ResourceError", f"The GPU ran out of memory: {error}", "Lower --vram or --context."))
        return 4
    except MemoryError:
        channel.send(Failed("ResourceError", "The engine ran out of memory.", "Lower --context or --max-running."))
        return 4
    except EOFError:
        raise
    except Exception as error:  # any error at all: the frontend must be told the cause before this process ends
        log.exception("The engine failed.")
        channel.send(Failed("EngineDead", f"The engine failed: {type(error).__name__}: {error}"))
        return 1
    return 0


def serve(admission: Admission, engine: Engine, channel: Channel) -> None:
    """Handle all pending messages, then run one step; repeat until Shutdown."""
    channel.send(engine.stats())
    unchecked = False  # steps were computed since the pages were checked
    copying = False  # pages were held by copies at the last look, so the last statistics count them as used
    while True:
        if not engine.has_work:
            copied, copying = copying, engine.keep_up()
            if copied and not copying:
                channel.send(engine.stats())
            busy = copying or admission.holds
            soon = unchecked or engine.has_idle_work
            came = channel.wait(POLL_MS if busy else CHECK_AFTER_MS if soon else IDLE_POLL_MS)
            if unchecked and not busy and not came:
                engine.scheduler.check()
                unchecked = False
            engine.clock.start()
        while channel.wait(0):
            message = channel.receive()
            if isinstance(message, Shutdown):
                if unchecked and not engine.has_work:
                    engine.scheduler.check()
                engine.settle()
                return
            handle(admission, engine, channel, message)
        if admission.holds:
            for request_id, error in admission.release():
                channel.send(refusal(request_id, error))
        if engine.has_work:
            events = engine.step()
            if events or not engine.stalls:
                channel.send(Tokens(events, engine.stats()))
            engine.clock.lap(Stage.PUBLISH)
            unchecked = True
            if engine.has_work and engine.stalls:
                channel.wait(POLL_MS)


def handle(admission: Admission, engine: Engine, channel: Channel, message: ToEngine) -> None:
    match message:
        case Submit(request):
            try:
                admission.submit(request)
            except ProaError as error:
                channel.send(refusal(request.id, error))
        case Abort(ids):
            for request_id in ids:
                admission.abort(request_id)
            channel.send(engine.stats())
        case Vocabulary():
            admission.grammars.learn(message)
        case _:
            raise ValueError(f"unexpected message {message!r}")


def refusal(request_id: str, error: ProaError) -> Refused:
    return Refused(request_id, type(error).__name__, error.message, error.remedy, error.param)
