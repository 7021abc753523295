"""What all routes share: the model once there is one, and what stands in its way. Never: the shapes of HTTP,
loading or stopping anything (run.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from proa.config.options import ServerOptions
from proa.engine.ipc import Loading
from proa.errors import EngineDead, ProaError, ShuttingDown
from proa.llm import AsyncLLM
from proa.obs.metrics import Metrics
from proa.server.errors import ApiError, from_proa

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_WARNED_NAMES = 1000  # a client that makes up field names must not fill the memory
_MOST_NAME_CHARACTERS = 200


@dataclass
class Tally:
    """One HTTP request as it passes: for the log line and the metrics."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None  # since the start
    trouble: str = ""  # why an answer that began with status 200 did not end well


class Service:
    """One served model. `llm` is None until its checkpoint was found and its engine started to load."""

    def __init__(self, options: ServerOptions, model: str, llm: AsyncLLM | None = None) -> None:
        self.options = options
        self.asked_model = model
        self.llm = llm
        self.progress: Loading | None = None  # of what comes before the engine: search, download
        self.failure: ProaError | None = None
        self.draining = asyncio.Event()
        self.in_flight = 0  # requests being answered
        self.metrics = Metrics(self._sample)
        self.created_s = int(time.time())
        self._warned: set[str] = set()

    @property
    def model_name(self) -> str:
        """The name in answers: --served-model-name, else the model as asked."""
        return self.options.served_model_name or self.asked_model

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    def check_model(self, name: str | None) -> None:
        """Take the served name, the model as asked, "default" or none. Raises ApiError 404 for another."""
        if name is None or name in (self.model_name, self.asked_model, "default"):
            return
        message = f'The model {name!r} is not served here. Use {self.model_name!r}, or "default".'
        raise ApiError(404, "model_not_found", message, param="model")

    def loaded(self) -> AsyncLLM:
        """The model's text side (it may still be loading weights). Raises ApiError 503."""
        self._refuse_if_ending()
        if self.llm is None:
            raise self._still_loading()
        return self.llm

    def ready(self) -> AsyncLLM:
        """The model, able to generate. Raises ApiError 503 while loading, draining or dead."""
        llm = self.loaded()
        if llm.engine.state == "loading":
            raise self._still_loading()
        return llm

    @property
    def death(self) -> ProaError | None:
        """Why there is no engine and will be none."""
        return self.failure or (self.llm.engine.failure if self.llm is not None else None)

    @property
    def loading(self) -> Loading:
        """How far loading is; meaningful while not ready."""
        report = self.llm.engine.loading if self.llm is not None else self.progress
        return report or Loading("starting", 0, 0)

    async def before_the_end(self, arriving: Coroutine[Any, Any, T]) -> T:
        """The result of what a client sends. A client that has not sent all when the server begins to drain is
        refused like new ones (ApiError 503): nothing waits for it."""
        reading = asyncio.create_task(arriving)
        ending = asyncio.create_task(self.draining.wait())
        try:
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                self._refuse_if_ending()
            return await reading
        finally:
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)

    def _refuse_if_ending(self) -> None:
        if self.is_draining:
            raise from_proa(ShuttingDown("The server is shutting down and takes no new requests.", "Try again soon."))
        if self.death is not None:
            raise from_proa(self._death_as_engine())

    def _death_as_engine(self) -> ProaError:
        """The failure as a client should see it: always 503, whatever kind of error stopped the engine."""
        death = self.death
        return death if isinstance(death, EngineDead) else EngineDead(str(death))

    def _still_loading(self) -> ApiError:
        report = self.loading
        message = f"The model is still loading ({report.phase}, {report.percent:.0f} %)."
        return ApiError(503, "loading", message, retry_after_s=max(1, min(60, round(report.eta_s or 5))))

    def warn_unknown(self, names: Collection[str]) -> None:
        """Log each unknown request field once."""
        for name in (name[:_MOST_NAME_CHARACTERS] for name in names):
            if name not in self._warned and len(self._warned) < _MOST_WARNED_NAMES:
                self._warned.add(name)
                log.warning("A client sends the unknown field %r; it is ignored.", name)

    def _sample(self) -> Mapping[str, float]:
        if self.llm is None:
            return {"ready": 0}
        plan = self.llm.plan
        ready = self.llm.engine.state == "ready" and not self.is_draining
        return {
            "ready": int(ready),
            "context_tokens": plan.context_tokens,
            "roof_tokens_per_s": plan.roof.tokens_per_s,
            **msgspec.structs.asdict(self.llm.engine.stats),
        }
