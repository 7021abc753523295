"""The Python API on uvloop's event loop, whose transports are no subclasses of asyncio's."""

from __future__ import annotations

import importlib
from contextlib import aclosing
from pathlib import Path

import pytest

from engines import request
from fetched import installed
from gpu_llm import make_model
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.llm import AsyncLLM

LIST = Path(__file__).parents[1] / "clients" / "uvloop.txt"


@pytest.mark.seldom
@pytest.mark.usefixtures("forked_engines")
def test_a_program_on_uvloop_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(LIST))
    uvloop = importlib.import_module("uvloop")
    options = from_keywords(EngineOptions, gpu="none", dtype="bfloat16", context=256)

    async def go() -> int:
        llm = await AsyncLLM.launch(make_model(tmp_path / "m"), options)
        try:
            await llm.engine.wait_ready()
            async with aclosing(llm.engine.generate(request("a", [1, 2, 3], 5))) as events:
                return sum([len(event.tokens) async for event in events])
        finally:
            await llm.close()

    assert uvloop.run(go()) == 5
