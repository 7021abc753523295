"""An engine that is started again when it dies: the one place that knows which engine process is the current one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from proa.engine.ipc import Loading, Ready
from proa.engine.processes.handle import EngineHandle, EngineState
from proa.engine.stats import Stats
from proa.errors import EngineDead, ProaError
from proa.grammar.vocabulary import Vocabulary
from proa.types import EngineRequest, TokenEvent

log = logging.getLogger(__name__)

MOST_RESTARTS = 3  # within WINDOW_S
WINDOW_S = 600.0


class RestartingEngine:
    """An EngineHandle over `first` and the engines that `launch` starts: when the loaded one dies, its requests fail
    and its plan is started again.

    An engine that has never been ready is not restarted, because the same plan would fail again. After MOST_RESTARTS
    within WINDOW_S the state is "failed", and `failure` is an EngineDead.
    """

    def __init__(self, first: EngineHandle, launch: Callable[[], Awaitable[EngineHandle]]) -> None:
        self._current = first
        self._launch = launch
        self._is_restarting = False
        self._failure: ProaError | None = None
        self._restarted_s: deque[float] = deque(maxlen=MOST_RESTARTS)
        self._vocabulary: Vocabulary | None = None
        self._watching = asyncio.create_task(self._watch())

    @property
    def state(self) -> EngineState:
        if self._failure is not None:
            return "failed"
        return "restarting" if self._is_restarting else self._current.state

    @property
    def loading(self) -> Loading | None:
        return self._current.loading

    @property
    def failure(self) -> ProaError | None:
        return self._failure

    @property
    def stats(self) -> Stats:
        return self._current.stats

    async def wait_ready(self) -> Ready:
        """Return when the first engine is loaded; raise its failure if it cannot be."""
        return await self._current.wait_ready()

    async def wait_ended(self) -> None:
        await asyncio.wait((self._watching,))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        if self._failure is not None:
            raise self._failure.again()
        if self._is_restarting:
            raise EngineDead("The engine has died and is being restarted.", "Retry in a few seconds.")
        async with aclosing(self._current.generate(request)) as events:
            async for event in events:
                yield event

    def learn(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        if not self._is_restarting:
            self._current.learn(vocabulary)

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._current.close()

    async def _watch(self) -> None:
        """Restart the engine as often as is allowed; return when it has failed for good."""
        try:
            await self._current.wait_ready()
        except ProaError as error:
            self._failure = error
            return
        failure = await self._death()
        while self._may_restart():
            self._is_restarting = True
            log.error("%s Restarting the engine (%d of %d).", failure, len(self._restarted_s), MOST_RESTARTS)
            try:
                await self._restart()
            except ProaError as error:
                failure = error
            else:
                failure = await self._death()
        self._failure = EngineDead(
            f"The engine died {MOST_RESTARTS + 1} times within {WINDOW_S / 60:.0f} minutes, the last time because: "
            f"{failure.message}",
            failure.remedy,
        )

    async def _death(self) -> ProaError:
        """Wait until the current engine ends; return why it did."""
        await self._current.wait_ended()
        return self._current.failure or EngineDead("The engine stopped by itself.")

    def _may_restart(self) -> bool:
        now_s = time.monotonic()
        if len(self._restarted_s) == MOST_RESTARTS and now_s - self._restarted_s[0] < WINDOW_S:
            return False
        self._restarted_s.append(now_s)
        return True

    async def _restart(self) -> None:
        """Replace the dead engine; return when the new one is ready. Raises the failure that prevents it."""
        await self._current.close()  # waits for the process, so that its memory is free
        try:
            self._current = await self._launch()
        except OSError as error:
            raise EngineDead(f"The engine process cannot be started: {error.strerror}.") from error
        await self._current.wait_ready()
        if self._vocabulary is not None:
            self._current.learn(self._vocabulary)
        self._is_restarting = False
        log.info("The engine is ready again.")
