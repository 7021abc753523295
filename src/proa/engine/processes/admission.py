"""Holds requests back until their grammars are compiled; other requests go on meanwhile. Never: messages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from proa.engine.engine import Engine
from proa.errors import ProaError, QueueFull
from proa.grammar.store import GrammarStore
from proa.types import EngineRequest


class Admission:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, grammars: GrammarStore) -> None:
        self._engine, self.grammars = engine, grammars
        self._held: dict[str, tuple[EngineRequest, Future[Any]]] = {}

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def submit(self, request: EngineRequest) -> None:
        """Submit a request, now or once its grammar is compiled. Raises what Engine.submit raises."""
        limits, prepared = self._engine.scheduler.limits, self.grammars.preparing(request.sampling)
        if prepared is None:
            self._engine.submit(request)
            return
        if len(self._held) >= limits.num_slots + limits.max_queued:
            raise QueueFull(f"{len(self._held)} requests wait for their grammars to be compiled.", "Try again later.")
        if prepared.done():
            self._submit(request, prepared)
        else:
            self._held[request.id] = request, prepared

    def _submit(self, request: EngineRequest, prepared: Future[Any]) -> None:
        self._engine.submit(request, self.grammars.follower(request.sampling, prepared))

    def abort(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is None:
            self._engine.abort(request_id)

    def release(self) -> Iterator[tuple[str, ProaError]]:
        """Submit the requests whose grammars are compiled. Yields id and error of those that are refused."""
        for request, prepared in [held for held in self._held.values() if held[1].done()]:
            del self._held[request.id]
            try:
                self._submit(request, prepared)
            except ProaError as error:
                yield request.id, error
