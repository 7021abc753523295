"""The published coding agents over `proa launch` and a real engine: each reads a file by a tool call and reports it.

The model says what a script says: a call in the agent's own tool, then, if the file's content comes back, a sentence.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import serving

import programs
from fetched import npm_package
from scripted_model import write_scripted_model

SECRET = "zebra-4711"
SAYS = f"The file says {SECRET}."
LIMIT_S = 200


@dataclass(frozen=True)
class Agent:
    """An npm package with an agent's program, the call that reads note.txt in a folder, and its words for one task."""

    spec: str
    sha512: str
    program: str
    tool: str
    arguments: dict[str, str]
    words: tuple[str, ...]


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code-linux-x64@2.1.330",
        "9Gn+V7DtJ8M1nztP9CeDVl9g3RtrepI7rOFTyPRRnZe8D6zebIHKmC7OvBauucuAP0X0k85SDN/LPVZyjsGezQ==",
        "claude",
        "Read",
        {"file_path": "{folder}/note.txt"},
        ("--allowedTools", "Read", "-p"),
    ),
    "codex": Agent(
        "@openai/codex@0.169.0-linux-x64",
        "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww==",
        "vendor/x86_64-unknown-linux-musl/bin/codex",
        "exec_command",
        {"cmd": "cat {folder}/note.txt"},
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
    ),
    "opencode": Agent(
        "opencode-linux-x64@1.18.33",
        "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
        "bin/opencode",
        "read",
        {"filePath": "{folder}/note.txt"},
        ("run",),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("work")
    (made / "note.txt").write_text(f"The password is {SECRET}.\n")
    return made


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    scripts: dict[str, Any] = {"": "Hello!", SECRET: SAYS}
    for name, agent in AGENTS.items():
        arguments = {key: value.format(folder=folder) for key, value in agent.arguments.items()}
        call = json.dumps({"name": agent.tool, "arguments": arguments})
        scripts[f"with {name}"] = f"<tool_call>\n{call}\n</tool_call>"
    model = write_scripted_model(tmp_path_factory.mktemp("scripted"), scripts)
    with serving(model, "--context=64k", "--gpu=none", "--served-model-name=scripted") as (_, loaded):
        yield loaded


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the packages are for x86-64")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_a_file(name: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    agent = AGENTS[name]
    package = npm_package(agent.spec, agent.sha512)
    report = request.getfixturevalue("report")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / name).symlink_to(package / agent.program)
    (package / agent.program).chmod(0o755)
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith("XDG_")},
        "HOME": str(tmp_path),
        "PWD": str(folder),  # opencode's folder is $PWD; files outside of it need a permission
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "IS_SANDBOX": "1",
    }
    asked = f"Read note.txt with {name}."
    done = subprocess.run(
        programs.proa("launch", name, f"--port={report['port']}", "--", *agent.words, asked),
        cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS in done.stdout
