"""Holds requests back until their grammars are compiled; other requests go on meanwhile. Never: messages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from llguidance import LLMatcher

from proa.engine.engine import Engine
from proa.errors import ProaError, QueueFull
from proa.grammar.store import GrammarStore
from proa.types import EngineRequest


class Admission:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, grammars: GrammarStore) -> None:
        self._engine, self.grammars = engine, grammars
        self._held: dict[str, tuple[EngineRequest, Future[LLMatcher]]] = {}

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def submit(self, request: EngineRequest) -> None:
        """Submit a request, now or once its grammar is compiled. Raises what Engine.submit raises."""
        constraint, limits = request.sampling.constraint, self._engine.scheduler.limits
        if constraint is None:
            self._engine.submit(request)
            return
        if len(self._held) >= limits.num_slots + limits.max_queued:
            raise QueueFull(f"{len(self._held)} requests wait for their grammars to be compiled.", "Try again later.")
        grammar = self.grammars.compiling(constraint)
        if grammar.done():
            self._submit(request, grammar)
        else:
            self._held[request.id] = request, grammar

    def _submit(self, request: EngineRequest, grammar: Future[LLMatcher]) -> None:
        self._engine.submit(request, self.grammars.matcher(grammar.result(), request.sampling))

    def abort(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is None:
            self._engine.abort(request_id)

    def release(self) -> Iterator[tuple[str, ProaError]]:
        """Submit the requests whose grammars are compiled. Yields id and error of those that are refused."""
        for request, grammar in [held for held in self._held.values() if held[1].done()]:
            del self._held[request.id]
            try:
                self._submit(request, grammar)
            except ProaError as error:
                yield request.id, error
