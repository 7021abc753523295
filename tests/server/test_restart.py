"""An engine that dies while it serves: requests end with an error, the server lives, the engine is started again."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace

import httpx
import pytest
from http_calls import CHAT, USER, run, send

from fakes import FakeEngine, Reply, make_plan
from proa.config.options import ServerOptions
from proa.engine.processes import restarting
from proa.engine.processes.restarting import RestartingEngine
from proa.errors import EngineDead, ResourceError, WeightsError
from proa.llm import AsyncLLM
from proa.server.service import Service
from proa.text.tokenizer import Tokenizer
from served import MODEL


class Engines:
    """Starts FakeEngines; `made` has them all."""

    def __init__(self, tokenizer: Tokenizer, state: str = "ready") -> None:
        self.made: list[FakeEngine] = []
        self.tokenizer = tokenizer
        self.state = state

    async def launch(self) -> FakeEngine:
        engine = FakeEngine(Reply(self.tokenizer.encode("word " * 40), delay_s=0.01), state=self.state)  # type: ignore[arg-type]
        self.made.append(engine)
        return engine

    async def service(self) -> Service:
        engine = RestartingEngine(await self.launch(), self.launch)
        await asyncio.sleep(0)
        return Service(ServerOptions(), MODEL, AsyncLLM(make_plan(), engine, self.tokenizer))


async def health(service: Service) -> str:
    answer: httpx.Response = await send(service, "GET", "/health")
    assert (answer.status_code == 200) == (answer.json()["status"] == "ready")
    return str(answer.json()["status"])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_engine_is_started_again(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        engines = Engines(tokenizer)
        service = await engines.service()
        asked = asyncio.create_task(send(service, "POST", CHAT, json={"messages": USER}))
        await asyncio.sleep(0.05)
        engines.state = "loading"
        engines.made[0].die()
        failed = await asked
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_dead")
        await settle()
        assert await health(service) == "restarting"
        refused = await send(service, "POST", CHAT, json={"messages": USER})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert engines.made[0].closed
        engines.made[1].become_ready()
        await settle()
        assert await health(service) == "ready"
        assert (await send(service, "POST", CHAT, json={"messages": USER})).status_code == 200
        assert service.llm is not None
        await service.llm.close()
        assert engines.made[1].closed

    run(work())


def test_the_new_engine_learns_the_vocabulary(tokenizer: Tokenizer) -> None:
    """Constraints need it; the frontend sends it once."""

    async def work() -> None:
        engines = Engines(tokenizer)
        engine = RestartingEngine(await engines.launch(), engines.launch)
        await asyncio.sleep(0)
        vocabulary = tokenizer.vocabulary(tokenizer.vocab_size)
        engine.learn(vocabulary)
        assert engines.made[0].vocabulary is vocabulary
        engines.made[0].die()
        await settle()
        assert engine.state == "ready"
        assert engines.made[1].vocabulary is vocabulary
        await engine.close()

    run(work())


@pytest.mark.parametrize("seconds_between", [0.0, restarting.WINDOW_S])
def test_restarts_are_limited(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, seconds_between: float) -> None:
    now_s = 0.0
    monkeypatch.setattr(restarting, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def work() -> None:
        nonlocal now_s
        engines = Engines(tokenizer)
        engine = RestartingEngine(await engines.launch(), engines.launch)
        await settle()
        for _ in range(restarting.MOST_RESTARTS):
            engines.made[-1].die()
            await settle()
            assert engine.state == "ready"
            now_s += seconds_between
        engines.made[-1].die(ResourceError("It has no memory.", "Buy some."))
        await settle()
        assert (engine.state == "failed") == (seconds_between == 0)
        if engine.state == "failed":
            await asyncio.wait_for(engine.wait_ended(), 1)
            assert isinstance(engine.failure, EngineDead)
            assert "4 times" in str(engine.failure)
            assert "no memory. Buy some." in str(engine.failure)
        await engine.close()

    run(work())


def test_an_engine_that_cannot_load_again_counts_as_dead(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        engines = Engines(tokenizer)
        engine = RestartingEngine(await engines.launch(), engines.launch)
        await settle()
        engines.state = "loading"
        engines.made[0].die()
        for i in range(1, restarting.MOST_RESTARTS + 1):
            await settle()
            assert engine.state == "restarting"
            engines.made[i].die(ResourceError("No memory.", "Wait."))
        await asyncio.wait_for(engine.wait_ended(), 1)
        assert engine.state == "failed"
        await engine.close()

    run(work())


def test_a_process_that_cannot_be_started_counts_as_dead(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        engines = Engines(tokenizer)
        refusals = iter([OSError(errno.EAGAIN, "no process is left"), None, *[OSError(errno.ENOMEM, "no memory")] * 2])

        async def launch() -> FakeEngine:
            if (refusal := next(refusals)) is not None:
                raise refusal
            return await engines.launch()

        engine = RestartingEngine(await engines.launch(), launch)
        await settle()
        engines.made[0].die()
        await settle()
        assert engine.state == "ready"
        engines.made[1].die()
        await asyncio.wait_for(engine.wait_ended(), 1)
        assert engine.state == "failed"
        assert "no memory" in str(engine.failure)
        await engine.close()

    run(work())


def test_an_engine_that_never_loaded_is_not_restarted(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        engines = Engines(tokenizer, state="loading")
        engine = RestartingEngine(await engines.launch(), engines.launch)
        engines.made[0].die(WeightsError("A file is truncated."))
        await asyncio.wait_for(engine.wait_ended(), 1)
        assert isinstance(engine.failure, WeightsError)
        assert len(engines.made) == 1
        await engine.close()

    run(work())
