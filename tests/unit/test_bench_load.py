"""`proa bench load`: computation of figures, reading files with threads, and a real engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes import make_tokenizer
from proa.bench import load
from proa.bench.load import LoadOptions, load_figures, predicted_load, read_files, run, write_new
from proa.cli.bench import run as bench
from proa.config.options import EngineOptions, MachineOptions, ModelOptions
from proa.engine.ipc import Ready
from proa.errors import UsageError
from tiny import make_tiny

pytestmark = pytest.mark.usefixtures("forked_engines")


def ready(load_seconds: float, peak_rss_bytes: int) -> Ready:
    return Ready(
        load_seconds=load_seconds, weights_bytes=3_000_000_000, ops={}, peak_rss_bytes=peak_rss_bytes,
        decode_threads=2, prefill_threads=2,
    )  # fmt: skip


def test_the_fastest_load_counts() -> None:
    loads = [ready(4.0, 5_000_000_000), ready(2.0, 6_000_000_000), ready(5.0, 4_000_000_000)]
    assert load_figures(loads, 8_000_000_000, 2, 1.6e10) == {
        "load_s": 2.0,
        "load_median_s": 4.0,
        "stored_gbytes": 8.0,
        "packed_gbytes": 3.0,
        "stored_gbytes_per_s": 4.0,
        "of_each_thread_gbytes_per_s": 2.0,
        "file_reads_gbytes_per_s": 16.0,
        "read_share": 0.25,
        "peak_rss_gbytes": 6.0,
    }


@pytest.mark.parametrize(
    ("stored", "kept", "read", "written", "seconds"),
    [(8e9, 4e9, 16e9, 8e9, 1.0), (8e9, 4e9, 16e9, 2e9, 2.5), (2e9, 4e9, 2e9, 2e9, 3.0)],
)
def test_reading_and_writing_add_up(stored: float, kept: float, read: float, written: float, seconds: float) -> None:
    assert predicted_load(round(stored), round(kept), read, written) == {
        "new_memory_gbytes_per_s": written / 1e9, "predicted_load_s": pytest.approx(seconds)
    }  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, (2 << 20) + 1, 5 << 20])
def test_new_memory_of_any_size_is_written(nbytes: int) -> None:
    assert write_new(nbytes, 2) > 0


@pytest.mark.parametrize("threads", [1, 3])
def test_files_are_read_once_and_whole(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [0, 1, (1 << 20) + 1]
    files = [tmp_path / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(b"x" * size)
    got: list[int] = []
    real = os.preadv

    def counted(fd: int, buffers: list[bytearray], offset: int) -> int:
        got.append(real(fd, buffers, offset))
        return got[-1]

    monkeypatch.setattr(os, "preadv", counted)
    assert read_files(files, threads) > 0
    assert sum(got) == sum(sizes)


def test_a_real_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_GIVEN_BACK_S", 0.0)
    folder = make_tiny("qwen3-moe", tmp_path)
    make_tokenizer(folder, vocab_size=256)
    argv = ["load", "--model", str(folder), "--runs", "2", "--threads", "1", "--gpu", "none", "--dtype", "bfloat16"]
    assert bench([*argv, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)["figures"]
    assert figures["predicted_load_s"] > 0
    file = folder / "model.safetensors"
    assert 0.9 * file.stat().st_size < figures["stored_gbytes"] * 1e9 < file.stat().st_size
    assert figures["load_s"] <= figures["load_median_s"]
    assert figures["stored_gbytes_per_s"] == pytest.approx(figures["stored_gbytes"] / figures["load_s"])


def test_random_weights_have_no_files(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    (folder / "model.safetensors").unlink()
    engine = EngineOptions(model=ModelOptions(load_format="dummy"), machine=MachineOptions(threads=1))
    with pytest.raises(UsageError, match="Dummy weights"):
        run(LoadOptions(model=str(folder), engine=engine))
