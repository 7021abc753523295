"""`proa serve` says which plan a trial took, and a later start takes it from the file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import programs
from e2e.serving import serving, wait_for
from gpu_llm import make_model

GPU = ("--gpu=sim:256MiB", "--gpu-experts=4", "--dtype=bfloat16", "--context=256", "--co-fetch=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_row_of_both_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_CACHE", str(tmp_path / "cache"))
    rows = []
    for trial in ("again", "auto"):
        with serving(folder, *GPU, f"--plan-trial={trial}") as (_, report):
            (row,) = (row for row in report["ready"]["decisions"] if row["name"] == "plan trial")
            rows.append(row)
    tried, kept = rows
    assert tried["asked"] == "again"
    assert tried["got"] in ("co-fetch off, read ahead on", "co-fetch off, read ahead off")
    assert "ms per token, mean of 1 and 4 requests, against" in tried["why"]
    assert tried["why"].endswith("; kept for later starts")
    assert (kept["asked"], kept["got"]) == ("auto", tried["got"])
    assert tried["why"].removesuffix("; kept for later starts") in kept["why"]
    (file,) = (tmp_path / "cache" / "trials").iterdir()
    assert json.loads(file.read_text())["read_ahead"] is tried["got"].endswith("read ahead on")


def test_the_table_for_people(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    argv = ("serve", str(folder), "--port=0", *GPU, "--plan-trial=off")
    with (
        (tmp_path / "out").open("w+") as out,
        subprocess.Popen(programs.proa(*argv), stdout=out, stderr=out) as process,
    ):
        printed = tmp_path / "out"
        wait_for(lambda: "is ready at" in printed.read_text() or process.poll() is not None)
        process.terminate()
    (line,) = (line for line in printed.read_text().splitlines() if line.startswith(" plan trial"))
    assert line.split() == ["plan", "trial", "off", "off", "as", "asked"]


def test_without_a_gpu_the_option_has_no_effect(folder: Path) -> None:
    with serving(folder, "--gpu=none", "--context=128", "--plan-trial=again") as (_, report):
        assert not [row for row in report["ready"]["decisions"] if row["name"] == "plan trial"]
        (row,) = (row for row in report["decisions"] if row["name"] == "--plan-trial")
        assert (row["asked"], row["got"], row["why"]) == ("again", "none", "no GPU is used")
