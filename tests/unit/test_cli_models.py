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


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert models["qwen3-30b"]["num_params"] > models["qwen3-30b"]["num_active_params"] > 0
    assert models["demo"]["size_bytes"] > 0
    assert all(model["path"] is None or model["path"].startswith("/") for model in models.values())
