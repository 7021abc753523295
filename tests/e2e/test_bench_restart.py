"""`proa bench restart` with real servers and a tiny model."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fakes import make_tokenizer
from proa.bench import restart
from proa.cli.bench_restart import run
from proa.errors import UsageError
from tiny import make_tiny


def test_a_prefix_cache_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=rf"No folder can be made in {place}: .*--prefix-cache-dir"):
            run([f"--prefix-cache-dir={place}"])


def test_a_server_that_keeps_no_files_is_refused(tmp_path: Path) -> None:
    row = {"name": "prefix cache files", "asked": "1 GiB", "got": "none", "why": "the prefix cache is off"}

    def start() -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({"url": "http://127.0.0.1:1", "decisions": [row]})

    options = restart.RestartOptions(str(make_tiny("qwen3-moe", tmp_path)), prefix_tokens=256)
    with pytest.raises(UsageError, match="keeps no prefix in files: the prefix cache is off"):
        restart.run(options, tmp_path, start, start)


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
