"""Runs a real HTTP server over a FakeEngine in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from fakes import FakeEngine, Reply, make_plan
from proa.config.options import ServerOptions
from proa.engine.ipc import Loading
from proa.llm import AsyncLLM
from proa.server.listen import bind, url_of
from proa.server.run import Shutdown, serve_on
from proa.server.service import Service
from proa.text.tokenizer import Tokenizer
from proa.types import EngineRequest, ProgressCallback

T = TypeVar("T")
MODEL = "fake"


def make_service(tokenizer: Tokenizer, engine: FakeEngine, **options: Any) -> Service:
    """Make a Service whose model is loaded, for tests without a socket."""
    return Service(ServerOptions(**options), MODEL, AsyncLLM(make_plan(), engine, tokenizer))


class Served:
    """`with Served(tokenizer, reply) as served:` runs a server on a free loopback port until the block ends.

    options: fields of ServerOptions. launch_gate: if given, the launch waits for it. exit: a future of serve_on's
    result (the exit code, or its error).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Reply | Callable[[EngineRequest], Reply] = Reply(),  # noqa: B008 - frozen
        *,
        engine: FakeEngine | None = None,
        launch_gate: threading.Event | None = None,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine or FakeEngine(reply)
        self.options = ServerOptions(**{"port": 0, **options})
        self.announced: list[str] = []
        self.exit: Future[int] = Future()
        self.shutdown = Shutdown()
        self.loop = asyncio.new_event_loop()
        self._gate = launch_gate
        self._listener = bind(self.options.host, self.options.port)
        self.url = url_of(self._listener, self.options.scheme)
        openai = pytest.importorskip("openai")  # without it the test is skipped
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)
        self._thread = threading.Thread(target=self._run, name="served")

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the server's event loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.exit.done():
            self.loop.call_soon_threadsafe(self.shutdown.request)
        self._thread.join(20)
        self.client.close()
        if self._thread.is_alive():
            raise AssertionError("the server did not stop")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            work = serve_on(self._listener, self._launch, MODEL, self.options, self.announced.append, self.shutdown)
            self.exit.set_result(self.loop.run_until_complete(work))
        except BaseException as error:  # noqa: BLE001 - the test shall see it
            self.exit.set_exception(error)
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _launch(self, progress: ProgressCallback) -> AsyncLLM:
        if self._gate is not None:
            progress("downloading", 30, 120)
            await asyncio.to_thread(self._gate.wait)
        if self.engine.state == "loading":
            self.engine.loading = Loading("reading weights", 250, 1000, 7.5)
        return AsyncLLM(make_plan(), self.engine, self.tokenizer)
