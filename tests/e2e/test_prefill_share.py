"""A long prompt beside a request that decodes, in a real engine process: how the time is divided between them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gpu_llm import launched, make_model
from proa.llm import AsyncLLM
from proa.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")

KINDS = [
    pytest.param({"gpu": "none", "gpu_experts": "auto"}, id="native"),
    pytest.param({"gpu": "none", "gpu_experts": "auto", "dtype": "float32"}, id="torch"),
    pytest.param({"gpu": "sim:256MiB"}, id="sim"),
    pytest.param({"gpu": "0"}, id="cuda", marks=pytest.mark.gpu),
]
PROMPT = [3 + 7 * i % 490 for i in range(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, num_hidden_layers=8)


async def tokens_beside(llm: AsyncLLM) -> tuple[int, list[int]]:
    """Tokens that another request gets while a prompt waits for its first one; and the answer to that prompt."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    tokens, started, sent = 0, asyncio.Event(), asyncio.Event()

    async def decode() -> None:
        nonlocal tokens
        stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=2000, **greedy))  # type: ignore[arg-type]
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                started.set()
                tokens += len(chunk.tokens) if sent.is_set() else 0

    decoding = asyncio.create_task(decode())
    await started.wait()
    sent.set()
    answer: list[int] = []
    waited = 0
    async with aclosing(llm.stream(PROMPT, SamplingParams(max_tokens=8, **greedy))) as chunks:  # type: ignore[arg-type]
        async for chunk in chunks:
            waited = waited or tokens
            answer += chunk.tokens
    assert not decoding.done()
    decoding.cancel()
    await asyncio.gather(decoding, return_exceptions=True)
    return waited, answer


@pytest.mark.alone  # other processes would delay the prompt on its way to the engine, while tokens are decoded
@pytest.mark.parametrize("kind", KINDS)
def test_who_decodes_goes_on(kind: dict[str, Any], folder: Path) -> None:
    """While steps are shared, a request that decodes gets one token for each of 8 chunks; else as many as the share
    leaves time for. In both cases it gets some before the engine has received the prompt."""

    async def run(share: float) -> tuple[int, list[int]]:
        asked = {"context": 2048, "max_batch_tokens": 80, "prefill_share": share, **kind}
        async with launched(folder, **asked) as llm:
            return await tokens_beside(llm)

    shared, whole = asyncio.run(run(0.0))
    turns, parts = asyncio.run(run(0.1))
    assert len(whole) == len(parts) == 8
    assert turns > 2 * shared
    if kind.get("dtype") == "float32":
        assert parts == whole


@pytest.mark.parametrize(
    ("asked", "share"), [({}, 0.5), ({"gpu_experts": "all"}, 0.0), ({"gpu_experts": "all", "prefill_share": 0.3}, 0.3)]
)
def test_who_takes_turns(asked: dict[str, Any], share: float, folder: Path) -> None:
    async def planned() -> tuple[float, tuple[str, str]]:
        async with launched(folder, "sim:256MiB", **asked) as llm:
            (row,) = [row for row in llm.plan.decisions if row.name == "prefill share"]
            return llm.plan.prefill_share, (row.asked, row.got)

    got, row = asyncio.run(planned())
    assert got == share
    assert row == ("0.3" if "prefill_share" in asked else "auto", f"{share:g}")
