"""What benchmarks refuse before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes import make_tokenizer
from proa.cli import bench_latency, bench_restart, bench_serve
from proa.engine.processes.client import EngineClient
from proa.errors import UsageError
from tiny import make_tiny


def _load(*_: Any, **__: Any) -> Any:
    raise AssertionError("the model is loaded")


@pytest.mark.parametrize(
    ("run", "lengths", "message"),
    [
        (bench_latency.run, ("--prompt-tokens=505", "--output-tokens=8"),
         r"--prompt-tokens 505 and --output-tokens 8 need a context of 513 tokens, but it has 512 \(the longest that "
         r"the model supports\). Lower them to 512 tokens together."),
        (bench_serve.run, ("--input-tokens=2", "--output-tokens=1k"),
         r"--input-tokens 2 and --output-tokens 1024 need a context of 1026 tokens, but it has 512 "),
        (bench_restart.run, ("--prefix-tokens=256", "--suffix-tokens=241"),
         r"--prefix-tokens 256 and --suffix-tokens 241 with answers of 16 tokens need a context of 513 tokens, but it "
         r"has 512 \(.*\). Lower them to 496 tokens together."),
    ],
)  # fmt: skip
def test_a_prompt_beyond_the_context_is_refused_before_the_model_is_loaded(
    run: Any, lengths: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "launch", _load)
    for module in (bench_serve, bench_restart):
        monkeypatch.setattr(module, "server_process", _load)
    folder = make_tiny("qwen3-moe", tmp_path)
    make_tokenizer(folder, vocab_size=256)
    with pytest.raises(UsageError, match=message):
        run([f"--model={folder}", "--gpu=none", *lengths])
