"""A listening thread keeps off the engine's CPU, and only while it listens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import request
from gpu_llm import make_model
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.processes.aside import Aside
from proa.llm import AsyncLLM

CPUS = os.sched_getaffinity(0)
pytestmark = [
    pytest.mark.usefixtures("forked_engines"),
    pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs"),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, CPUS)


def test_affinity_is_changed_and_restored() -> None:
    first, *others = sorted(CPUS)
    aside = Aside()
    aside.cpus = [first]
    aside.listen()
    assert os.sched_getaffinity(0) == set(others)
    aside.listen()  # a second listen() changes nothing
    aside.rest()
    assert os.sched_getaffinity(0) == CPUS
    aside.rest()
    assert os.sched_getaffinity(0) == CPUS


@pytest.mark.parametrize("taken", [(), sorted(CPUS), [max(CPUS) + 1]], ids=["none", "all", "another machine's"])
def test_affinity_stays_without_other_cpus(taken: list[int]) -> None:
    aside = Aside()
    aside.cpus = taken
    aside.listen()
    assert os.sched_getaffinity(0) == CPUS
    aside.rest()
    assert os.sched_getaffinity(0) == CPUS


@pytest.mark.parametrize("own_thread", [True, False])
def test_client_listens_only_while_requests_run(own_thread: bool, tmp_path: Path) -> None:
    options = from_keywords(EngineOptions, gpu="none", dtype="bfloat16", context=256)

    async def go() -> tuple[set[int], list[set[int]]]:
        llm = await AsyncLLM.launch(make_model(tmp_path / "m"), options, own_thread=own_thread)
        try:
            engine_cpus = set((await llm.engine.wait_ready()).caller_cpus)
            seen = [os.sched_getaffinity(0)]
            streams = [llm.engine.generate(request(name, [1, 2, 3], 100)) for name in ("a", "b")]
            for stream in streams:
                await anext(stream)
                seen.append(os.sched_getaffinity(0))
            for stream in streams:
                await stream.aclose()
                seen.append(os.sched_getaffinity(0))
            return engine_cpus, seen
        finally:
            await llm.close()

    engine_cpus, seen = asyncio.run(go())
    off = CPUS - engine_cpus if own_thread else CPUS
    assert len(engine_cpus) == 1
    assert seen == [CPUS, off, off, off, CPUS]
