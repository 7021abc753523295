"""The interface of an engine to a frontend. engine/processes/client.py implements it; tests use fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

from proa.engine.ipc import Loading, Ready
from proa.engine.stats import Stats
from proa.errors import ProaError
from proa.grammar.vocabulary import Vocabulary
from proa.types import EngineRequest, TokenEvent

EngineState = Literal["loading", "ready", "restarting", "failed", "stopped"]


class EngineHandle(Protocol):
    """One engine. All methods belong to one asyncio event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def loading(self) -> Loading | None:
        """The latest progress report while state is "loading"."""

    @property
    def failure(self) -> ProaError | None:
        """Why state is "failed"."""

    @property
    def stats(self) -> Stats: ...

    async def wait_ready(self) -> Ready:
        """Return when the model is loaded; raise the failure if it cannot be."""

    async def wait_ended(self) -> None:
        """Return when the state is "failed" or "stopped"."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """Submit one sequence; yield its events until one has `finish`. Closing the generator early aborts the
        request and frees its pages.

        Raises QueueFull, ContextLengthExceeded, ResourceError, EngineDead, ShuttingDown.
        """

    def learn(self, vocabulary: Vocabulary) -> None:
        """Give the engine the model's vocabulary, before the first request with a constraint."""

    async def close(self) -> None:
        """Stop the engine process; running requests end with finish "abort". Idempotent."""
