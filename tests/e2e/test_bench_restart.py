"""`proa bench restart` with real servers and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import make_tokenizer
from proa.cli.bench_restart import run
from tiny import make_tiny


@pytest.mark.seldom
@pytest.mark.alone
def test_the_prefix_is_restored_with_equal_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny("qwen3-moe", tmp_path / "model", vocab_size=512, max_position_embeddings=2048)
    make_tokenizer(folder, vocab_size=512)
    argv = ["--model", str(folder), "--prefix-tokens=1024", "--suffix-tokens=32", "--runs=2", "--gpu=none"]
    more = ["--dtype=bfloat16", "--threads=2", f"--prefix-cache-dir={tmp_path / 'cache'}", "--json"]
    assert run([*argv, *more]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["cached_tokens"] == 1024
    assert figures["cached_share"] == 1
    assert figures["logprob_difference"] == 0
    assert figures["restored_bytes_per_s"] > 0
    assert figures["files"] == 4
    assert figures["predicted_restore_ms"] == pytest.approx(
        1e3 * figures["restored_bytes"] / figures["file_bytes_per_s"]
    )
    assert 0 < figures["predicted_hit_ttft_ms"] < figures["predicted_computed_ttft_ms"]
    assert list((tmp_path / "cache").iterdir()) == []
