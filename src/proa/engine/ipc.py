"""Typed messages between the API process and the engine process: msgpack, no pickle. Never: logic.

Frontend -> engine: Start once, then Submit and Abort, a Vocabulary before the first request with a constraint, at last
Shutdown. Engine -> frontend: Loading*, then Ready or Failed, then Tokens, Refused and Stats until the end.
"""

from __future__ import annotations

import msgspec

from proa.engine.stats import Stats
from proa.grammar.vocabulary import Vocabulary
from proa.plan.plan import Plan
from proa.types import Decision, EngineRequest, TokenEvent

PROTOCOL = 5  # raised with every incompatible change; both sides compare it in Start


class Start(msgspec.Struct, frozen=True, tag=True):
    plan: Plan
    protocol: int = PROTOCOL


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop after the current step; running requests are ended with "abort"."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    phase: str
    done_bytes: int
    total_bytes: int
    eta_s: float | None = None

    @property
    def percent(self) -> float:
        return 100.0 * self.done_bytes / max(self.total_bytes, 1)


class Ready(msgspec.Struct, frozen=True, tag=True):
    load_seconds: float
    weights_bytes: int
    ops: dict[str, str]  # op -> implementation
    peak_rss_bytes: int
    decode_threads: int  # threads that a step of few tokens uses
    prefill_threads: int
    formats: dict[str, int] = {}  # format of packed weights in RAM -> bytes
    pages: dict[str, int] = {}  # kind of memory page that they lie on -> bytes
    decisions: tuple[Decision, ...] = ()  # made after the model was loaded
    caller_cpus: list[int] = []  # CPUs that the engine's own thread is bound to
    round_trip_us: float | None = None  # of an empty job from the GPU to the CPU and back; None: no GPU sends jobs
    timeline: dict[str, float] = {}  # stage of the start -> seconds from the process's begin to the stage's end


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; `error` is a class name of proa.errors."""

    error: str
    message: str
    remedy: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    id: str
    error: str
    message: str
    remedy: str = ""
    param: str | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """All events of a step in one message, because each message wakes a thread here and two in the frontend."""

    events: list[TokenEvent]
    stats: Stats


ToEngine = Start | Submit | Abort | Shutdown | Vocabulary
FromEngine = Loading | Ready | Failed | Tokens | Refused | Stats
