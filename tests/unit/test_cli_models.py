"""`proa models`."""

from __future__ import annotations

import json

import pytest

from proa.cli.models import run


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    for part in ("name", "parameters", "size", "demo", "demo-dense", "qwen3-30b", "3.35B active", "GiB"):
        assert part in shown


def test_a_narrow_terminal_shows_whole_names_and_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proa.obs.console._PIPE_COLUMNS", 40)
    assert run([]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = "".join(line[: line.index(" ", 1)].strip() for line in shown if line.strip())
    for name in ("qwen3-30b-instruct", "deepseek-v2-lite"):
        assert name in names
    assert sum("GiB" in line for line in shown) > 10


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert models["qwen3-30b"]["num_params"] > models["qwen3-30b"]["num_active_params"] > 0
    assert models["demo"]["size_bytes"] > 0
    assert all(model["path"] is None or model["path"].startswith("/") for model in models.values())
