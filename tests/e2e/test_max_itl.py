"""A long prompt beside a decoding request, in a real engine process: how both share the time (--max-itl)."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gpu_llm import launched, make_model
from proa.cli.main import main
from proa.engine.stats import GapStats
from proa.llm import AsyncLLM
from proa.machine.cost.turns import GapLimit
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
    """Tokens that a decoding request gets while a prompt waits for its first one, and that prompt's answer."""
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


@pytest.mark.alone  # tokens that come while the prompt is on its way to the engine count too
@pytest.mark.parametrize("kind", KINDS)
def test_decode_goes_on(kind: dict[str, Any], folder: Path) -> None:
    """Each of 8 chunks gives others one token where steps are shared; else as many as the limit leaves time for. Both
    have some until the prompt is with the engine. The gaps are counted."""

    async def run(limit: str) -> tuple[int, list[int], GapStats]:
        asked = {"context": 2048, "max_batch_tokens": 80, "max_itl": limit, **kind}
        async with launched(folder, **asked) as llm:
            return *await tokens_beside(llm), llm.engine.stats.gaps

    shared, whole, shared_gaps = asyncio.run(run("none"))
    turns, parts, gaps = asyncio.run(run("1.5x"))
    assert (shared_gaps.limit_seconds, shared_gaps.over_limit) == (0, 0)
    assert shared_gaps.beside > 0
    assert gaps.limit_seconds > 0
    assert gaps.beside > shared_gaps.beside
    assert gaps.undisturbed > 0
    assert 0 < gaps.beside_seconds / gaps.beside <= gaps.longest_beside_seconds
    assert len(whole) == len(parts) == 8
    assert turns > 2 * shared
    if kind.get("dtype") == "float32":
        assert parts == whole


@pytest.mark.parametrize(
    ("asked", "got"), [({}, "2.5x"), ({"gpu_experts": "all"}, "none"), ({"gpu_experts": "all", "max_itl": "4x"}, "4x")]
)
def test_where_prompts_take_turns(asked: dict[str, Any], got: str, folder: Path) -> None:
    async def planned() -> tuple[GapLimit | None, tuple[str, str]]:
        async with launched(folder, "sim:256MiB", **asked) as llm:
            (row,) = [row for row in llm.plan.decisions if row.name == "longest gap"]
            return llm.plan.max_itl, (row.asked, row.got)

    limit, row = asyncio.run(planned())
    assert limit == (None if got == "none" else GapLimit(factor=float(got.removesuffix("x"))))
    assert row == (asked.get("max_itl", "auto"), got)


@pytest.mark.parametrize("text", ["0.9x", "fast", "0.000001ms"])
def test_a_limit_that_cannot_be_kept_is_refused_before_loading(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["proa", "serve", str(folder), "--gpu=none", "--port=0", f"--max-itl={text}"])
    assert main() != 0
    printed = capsys.readouterr().err
    assert f"--max-itl {text}" in printed or f"--max-itl is '{text}'" in printed
    assert "factor" in printed
