"""An engine process that begins before there is a plan: who ends it, and how the frontend hears of its death."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from e2e.serving import engines_of
from engines import request
from fakes import make_plan, make_tokenizer
from proa.config.options import EngineOptions, MachineOptions
from proa.engine.processes.client import EngineClient
from proa.engine.processes.early import EarlyProcess
from proa.engine.processes.process import EngineProcess
from proa.errors import EngineDead, ResourceError, TokenizerError
from proa.llm import AsyncLLM
from proa.plan.plan import Plan
from tiny import make_tiny

AT_ONCE_S = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny") / "m", vocab_size=512)
    return make_tokenizer(folder, vocab_size=512)


def plan_for(folder: Path) -> Plan:
    return make_plan(path=str(folder), context_tokens=256, page_tokens=4, num_pages=64, max_queued=8)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_start_that_is_refused_ends_it_at_once() -> None:
    with pytest.raises(ResourceError, match="does not fit"), EarlyProcess() as early:  # noqa: PT012
        early.begin()
        early.begin()
        (pid,) = engines_of(os.getpid())
        begin_s = time.monotonic()
        raise ResourceError("It does not fit.")
    assert not exists(pid)
    assert time.monotonic() - begin_s < AT_ONCE_S
    early.begin()  # as by a planning thread that goes on after its task was cancelled
    assert not engines_of(os.getpid())


def test_what_a_client_has_taken_outlives_the_block(folder: Path) -> None:
    async def go() -> None:
        with EarlyProcess() as early:
            early.begin()
            (pid,) = engines_of(os.getpid())
            client = await EngineClient.launch(plan_for(folder), process=early.take())
        ready = await client.wait_ready()
        stages = list(ready.timeline)
        assert stages[:3] == ["imports", "plan", "headers"]
        assert exists(pid)
        events = [event async for event in client.generate(request("a", [5, 6], 3))]
        assert events[-1].finish == "length"
        await client.close()
        assert not exists(pid)

    asyncio.run(go())


def test_closing_while_it_imports_takes_no_time(folder: Path) -> None:
    async def go() -> None:
        client = await EngineClient.launch(plan_for(folder))
        (pid,) = engines_of(os.getpid())
        begin_s = time.monotonic()
        await client.close()
        assert time.monotonic() - begin_s < 2 * AT_ONCE_S
        assert not exists(pid)

    asyncio.run(go())


def test_one_that_is_killed_while_the_frontend_plans(folder: Path) -> None:
    async def go() -> None:
        process = EngineProcess()
        process.kill()
        await process.wait()
        client = await EngineClient.launch(plan_for(folder), process=process)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            await client.wait_ready()
        await client.close()

    asyncio.run(go())


def test_why_it_cannot_be_imported_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))

    async def go() -> None:
        client = await EngineClient.launch(plan_for(folder))
        with pytest.raises(EngineDead, match=r"cannot be imported: OSError: libcudart.so.13: cannot open"):
            await client.wait_ready()
        await client.close()

    asyncio.run(go())
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("refused_by", ["plan", "tokenizer"])
def test_a_model_that_is_refused_leaves_no_process(refused_by: str, folder: Path, tmp_path: Path) -> None:
    if refused_by == "plan":
        model, options, error = folder, EngineOptions(machine=MachineOptions(ram=1 << 20)), ResourceError
    else:
        model, options, error = make_tiny("qwen3-moe", tmp_path / "m"), EngineOptions(), TokenizerError
    with pytest.raises(error):
        asyncio.run(AsyncLLM.launch(str(model), options))
    assert not engines_of(os.getpid())
