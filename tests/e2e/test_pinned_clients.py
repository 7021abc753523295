"""The published clients, each in the version and with the dependencies of its list, over `proa serve` and a real
engine. The model says what a script says; what each client does is in clients/use_NAME.py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving

import programs
from engine_forks import EngineForks
from fetched import installed
from scripted_model import write_scripted_model

CLIENTS = Path(__file__).parents[1] / "clients"
NAMES = sorted(path.stem.removeprefix("use_") for path in CLIENTS.glob("use_*.py"))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SCRIPTS: dict[str, Any] = {
    "": "Hello!",
    "weather?": [f"<think>\nI must ask.\n</think>\n\nOne moment.\n{CALL}", "It is 21 degrees."],
}
LIMIT_S = 120


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, engine_forks: EngineForks | None) -> Iterator[str]:
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPTS)
    flags = ("--context=8k", "--gpu=none", "--served-model-name=scripted")
    with serving(folder, *flags, forks=engine_forks) as (_, loaded):
        yield loaded["url"]


@pytest.mark.seldom
@pytest.mark.parametrize("name", NAMES)
def test_client(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    packages = installed(CLIENTS / f"{name}.txt")
    environ = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")}
    done = subprocess.run(
        programs.python(str(CLIENTS / f"use_{name}.py"), request.getfixturevalue("url")),
        env={**environ, "PYTHONPATH": str(packages), "HOME": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
