"""The state that all routes share: the served model, its loading progress or fatal error, draining, metrics. run.py
starts and stops it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proa.config.options import ServerOptions
from proa.engine.ipc import Loading
from proa.errors import EngineDead, ProaError, ShuttingDown
from proa.llm import AsyncLLM
from proa.obs.metrics import Metrics
from proa.server.errors import ApiError, from_proa
from proa.server.interrupt import InterruptedWorkError, unless
from proa.server.precheck import Precheck
from proa.server.stored_responses import StoredResponses

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_WARNED_NAMES = 1000  # bounds the memory that a client can take by inventing field names
_MOST_NAME_CHARACTERS = 200


@dataclass
class RequestRecord:
    """Counts and times of one HTTP request, for its log line and the metrics."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    streamed_tokens: int = 0  # see PromptExperts
    cpu_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None  # seconds from started_s
    error: str = ""  # why a response that began with status 200 failed


class Turns:
    """Spreads work of milliseconds, such as tokenising a prompt: one piece per iteration of the event loop. Otherwise a
    burst of requests would block the loop until all of them are tokenised."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Return in an iteration of the event loop that no other caller gets."""
        async with self._lock:
            await asyncio.sleep(0)


class Service:
    """One served model. `llm` is None until the checkpoint is found and its engine has started to load."""

    def __init__(self, options: ServerOptions, model: str, llm: AsyncLLM | None = None) -> None:
        self.options = options
        self.requested_model = model
        self.llm = llm
        self.precheck: Precheck | None = None
        self.progress: Loading | None = None  # search and download, before there is an engine
        self.failure: ProaError | None = None
        self.draining = asyncio.Event()
        self.in_flight = 0  # HTTP requests being served
        self.metrics = Metrics(self._sample)
        self.responses = StoredResponses(options.stored_responses)
        self.turns = Turns()
        self.created_s = int(time.time())
        self._warned: set[str] = set()

    @property
    def model_name(self) -> str:
        """The name in responses: --served-model-name, else MODEL as given."""
        return self.options.served_model_name or self.requested_model

    @property
    def _accepts_any_model(self) -> bool:
        asked = self.options.accept_any_model
        return self.options.is_loopback if asked is None else asked

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    def check_model(self, name: str | None) -> None:
        """Accept the served name, MODEL as given, "default" and None, with --accept-any-model every name. Raises
        ApiError 404."""
        if name is not None:
            name = name.removesuffix(":latest")  # added by Ollama's clients
        known = (None, self.model_name, self.requested_model, "default")
        if name in known or self._accepts_any_model:
            return
        message = f'The model {name!r} is not served here. Use {self.model_name!r}, or "default".'
        raise ApiError(404, "model_not_found", message, param="model")

    def loaded(self) -> AsyncLLM:
        """Return the model for tokenising; its engine may still be loading weights. Raises ApiError 503 before that,
        while draining, or after a fatal error."""
        self._refuse_if_unavailable()
        if self.llm is None:
            raise self._still_loading()
        return self.llm

    def ready(self) -> AsyncLLM:
        """Return the model, ready to generate. Raises ApiError 503 while loading, draining, or after a fatal error."""
        llm = self.loaded()
        if llm.engine.state == "loading":
            raise self._still_loading()
        if llm.engine.state == "restarting":
            raise from_proa(EngineDead("The engine has died and is being restarted.", "Retry in a few seconds."))
        return llm

    @property
    def fatal_error(self) -> ProaError | None:
        """The fatal error that ended loading or the engine; None if there is none."""
        return self.failure or (self.llm.engine.failure if self.llm is not None else None)

    @property
    def loading(self) -> Loading:
        """Loading progress; meaningful only until the model is ready."""
        report = self.llm.engine.loading if self.llm is not None else self.progress
        return report or Loading("starting", 0, 0)

    async def unless_draining(self, arriving: Coroutine[Any, Any, T]) -> T:
        """Await the client's upload. If the server starts draining before it is complete, refuse it like a new request
        (ApiError 503): a slow upload must not delay the shutdown."""
        try:
            return await unless(self.draining.wait, arriving)
        except InterruptedWorkError:
            self._refuse_if_unavailable()
            raise

    def _refuse_if_unavailable(self) -> None:
        if self.is_draining:
            raise from_proa(
                ShuttingDown("The server is shutting down and accepts no new requests.", "Retry in a few seconds.")
            )
        if self.fatal_error is not None:
            raise from_proa(self._as_engine_dead())

    def _as_engine_dead(self) -> ProaError:
        """Return the fatal error as EngineDead, so that clients always get 503, whatever error it was."""
        fatal_error = self.fatal_error
        return fatal_error if isinstance(fatal_error, EngineDead) else EngineDead(str(fatal_error))

    def _still_loading(self) -> ApiError:
        report = self.loading
        message = f"The model is still loading ({report.phase}, {report.percent:.0f} %). Retry later."
        return ApiError(503, "loading", message, retry_after_s=max(1, min(60, round(report.eta_s or 5))))

    def warn_unknown(self, names: Collection[str]) -> None:
        """Log each unknown request field once."""
        for name in (name[:_MOST_NAME_CHARACTERS] for name in names):
            if name not in self._warned and len(self._warned) < _MOST_WARNED_NAMES:
                self._warned.add(name)
                log.warning("A request has the unknown field %r, which is ignored.", name)

    def _sample(self) -> Mapping[str, float]:
        if self.llm is None:
            return {"ready": 0}
        plan = self.llm.plan
        ready = self.llm.engine.state == "ready" and not self.is_draining
        return {
            "ready": int(ready),
            "context_tokens": plan.context_tokens,
            "roof_tokens_per_s": plan.roof.tokens_per_s,
            **self.llm.engine.stats.values(),
        }
