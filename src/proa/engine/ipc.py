"""Typed messages between the API process and the engine process: msgpack, no pickle. Never: logic.

Frontend -> engine: Start once, then Submit and Abort, at last Shutdown. Engine -> frontend: Loading*, then Ready or
Failed, then Tokens, Refused and Stats until the end.
"""

from __future__ import annotations

import msgspec

from proa.plan.plan import Plan
from proa.types import Decision, EngineRequest, TokenEvent

PROTOCOL = 2  # raised with every incompatible change; both sides compare it in Start


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
    decode_threads: int  # of the plan's threads, how many a step of few tokens uses
    prefill_threads: int
    formats: dict[str, int] = {}  # how weights lie in RAM -> bytes
    pages: dict[str, int] = {}  # the kind of page they lie on -> bytes
    decisions: tuple[Decision, ...] = ()  # that only the loaded model could tell
    caller_cpus: list[int] = []  # that the engine's own thread is bound to
    round_trip_us: float | None = None  # of a GPU's job without work, to the CPU and back; None: there are no jobs
    timeline: dict[str, float] = {}  # seconds since the engine's process began, at the end of each stage of the start


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


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Sent with every step and when anything else changed. Counters only grow. Who makes one names its values by their
    order: what the scheduler counts, then times, then what the CPU did for a GPU."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0  # on the free list
    pages_cached: int = 0  # held only by the prefix cache, evictable at once
    state_copies: int = 0  # of recurrent states, where prompts may go on
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    schedule_seconds: float = 0.0  # time spent in steps, by engine/executors/clock.py's stages
    inputs_seconds: float = 0.0
    program_seconds: float = 0.0
    sample_seconds: float = 0.0
    publish_seconds: float = 0.0  # up to the step before
    cpu_jobs: int = 0  # a GPU's, for experts that the CPU has: one a layer and step, if any is chosen
    cpu_weight_bytes: int = 0  # of the experts that they needed, each once a job
    cpu_experts_needed: int = 0  # these experts
    cpu_experts_foreseen: int = 0  # of these, what was known before the job came
    cpu_experts_seconds: float = 0.0  # within program_seconds: from a job's arrival to its answer
    cpu_waiting_seconds: float = 0.0  # from an answer to the next job
    cpu_gaps: int = 0  # between a layer's experts and those of the next layer, where the CPU has some of both
    cpu_gap_seconds: float = 0.0  # of these
    expert_looks: int = 0  # where choices of experts are counted, since they move or somebody asked for it
    expert_choices: int = 0  # by tokens
    expert_hits: int = 0  # of these, what the GPU had
    expert_hit_bytes: int = 0  # of their weights, each expert once a step
    expert_missed_bytes: int = 0  # of the other choices' weights
    expert_moved_bytes: int = 0  # of experts that changed places

    @property
    def host_seconds(self) -> float:
        """Of steps, outside of the model."""
        return self.schedule_seconds + self.inputs_seconds + self.sample_seconds + self.publish_seconds

    @property
    def step_seconds(self) -> float:
        """The engine's own clock, which stands still while there is no work."""
        return self.host_seconds + self.program_seconds


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What a step did, in one message: each wakes a thread here and two in the frontend."""

    events: list[TokenEvent]
    stats: Stats


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Loading | Ready | Failed | Tokens | Refused | Stats
