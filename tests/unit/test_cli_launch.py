"""`proa launch`: what each agent is started with, over a running server."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs
from openai_stub import Stub, serve_stub
from proa.cli import launch
from proa.cli.launch import AGENTS
from proa.config.env import read_env
from proa.errors import UsageError

URL, MODEL, KEY, CONTEXT = "http://127.0.0.1:8000", "my/model", "sesame", 65536


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve_stub(Stub()) as served:
        yield served


def test_claude(tmp_path: Path) -> None:
    start = AGENTS["claude"](URL, MODEL, KEY, CONTEXT, tmp_path)
    assert start.flags == ()
    assert (start.environ["ANTHROPIC_BASE_URL"], start.environ["ANTHROPIC_AUTH_TOKEN"]) == (URL, KEY)
    models = {value for name, value in start.environ.items() if name.endswith("_MODEL")}
    assert models == {MODEL}
    assert start.environ["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"


def test_codex(tmp_path: Path) -> None:
    start = AGENTS["codex"](URL, MODEL, KEY, CONTEXT, tmp_path)
    settings = tomllib.loads("\n".join(start.flags[1::2]))
    assert set(start.flags[::2]) == {"-c"}
    assert (settings["model"], settings["model_provider"]) == (MODEL, "proa")
    provider = settings["model_providers"]["proa"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert start.environ == {provider["env_key"]: KEY}
    read_env(start.environ)  # the agent may run `proa`, which refuses unknown PROA_ variables


def test_opencode(tmp_path: Path) -> None:
    start = AGENTS["opencode"](URL, MODEL, KEY, CONTEXT, tmp_path)
    config = json.loads(Path(start.environ["OPENCODE_CONFIG"]).read_text())
    assert config["model"] == config["small_model"] == f"proa/{MODEL}"
    provider = config["provider"]["proa"]
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": KEY}
    assert provider["models"][MODEL]["limit"]["context"] == CONTEXT


def test_agents_must_be_known_and_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no agent vim"):
        launch.run(["vim"])
    with pytest.raises(UsageError, match="npm install -g @openai/codex"):
        launch.run(["codex"])


def test_words_after_the_dashes_and_the_exit_code_are_the_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stub: Stub
) -> None:
    agent = tmp_path / "claude"
    agent.write_text('#!/bin/sh\necho "$@ $ANTHROPIC_BASE_URL" > "$(dirname "$0")/said"\nexit 7\n')
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert launch.run(["claude", f"--port={stub.port}", "--", "-p", "Hi", "--port", "5"]) == 7
    assert (tmp_path / "said").read_text() == f"-p Hi --port 5 http://127.0.0.1:{stub.port}\n"


# Agents that write the path of their settings, and that they are ready for signals.
SLEEPS = "sleep 0.1; echo $OPENCODE_CONFIG; exec sleep 60"
ENDS_SLOWLY = "trap 'sleep 0.7; exit 7' INT; sleep 0.1; echo $OPENCODE_CONFIG; while true; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("agent", "number", "code"),
    [(SLEEPS, signal.SIGTERM, 143), (SLEEPS, signal.SIGHUP, 129), (ENDS_SLOWLY, signal.SIGINT, 7)],
)
def test_signals_end_the_agent_first_and_leave_no_folder_behind(
    agent: str, number: signal.Signals, code: int, tmp_path: Path, stub: Stub
) -> None:
    program = tmp_path / "opencode"
    program.write_text(f"#!/bin/sh\n{agent}\n")
    program.chmod(0o755)
    process = subprocess.Popen(
        programs.proa("launch", "opencode", f"--port={stub.port}"), stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}, process_group=0,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        settings = Path(process.stdout.readline().strip())
        assert settings.exists()
        if number == signal.SIGINT:  # Ctrl-C: from the terminal to all its programs
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.stdout.read() == "", "the agent has ended, and its end of the pipe is closed"
        assert process.wait(10) == code
    assert [path.name for path in tmp_path.iterdir()] == ["opencode"]
