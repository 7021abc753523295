"""The published coding agents over `proa launch` and a real engine: each reads a file by a tool call and reports it.

The model says what a script says: a call in the agent's own tool, then, if the file's content comes back, a sentence.
What the agent sends is recorded: every schema of its tools must compile to a grammar.
"""

from __future__ import annotations

import json
import os
import platform
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from serving import serving

import programs
from engine_forks import EngineForks
from fetched import npm_package
from proa.grammar.trial import verdict
from proa.types import Constraint
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
    least_tools: int  # that it offers


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code-linux-x64@2.1.330",
        "9Gn+V7DtJ8M1nztP9CeDVl9g3RtrepI7rOFTyPRRnZe8D6zebIHKmC7OvBauucuAP0X0k85SDN/LPVZyjsGezQ==",
        "claude",
        "Read",
        {"file_path": "{folder}/note.txt"},
        ("--allowedTools", "Read", "-p"),
        10,
    ),
    "codex": Agent(
        "@openai/codex@0.169.0-linux-x64",
        "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww==",
        "vendor/x86_64-unknown-linux-musl/bin/codex",
        "exec_command",
        {"cmd": "cat {folder}/note.txt"},
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        5,
    ),
    "opencode": Agent(
        "opencode-linux-x64@1.18.33",
        "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
        "bin/opencode",
        "read",
        {"filePath": "{folder}/note.txt"},
        ("run",),
        8,
    ),
}


@contextmanager
def recorded(port: int) -> Iterator[tuple[int, list[bytearray]]]:
    """Forward connections to `port`; yield the port that listens, and what clients have sent on each connection."""
    sent: list[bytearray] = []
    stopped = threading.Event()

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            kept = bytearray()
            sent.append(kept)
            with socket.create_connection(("127.0.0.1", port)) as server, suppress(OSError):
                ends = {self.request: server, server: self.request}
                while not stopped.is_set():
                    for source in select.select(list(ends), [], [], 0.2)[0]:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        if source is self.request:
                            kept.extend(data)
                        ends[source].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as forwarding:
        thread = threading.Thread(target=forwarding.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield forwarding.server_address[1], sent
        finally:
            stopped.set()
            forwarding.shutdown()
            thread.join()


def schemas_of(sent: list[bytearray]) -> dict[str, Any]:
    """The schemas of all tools in recorded requests, by name, in the form of any protocol."""
    found: dict[str, Any] = {}

    def add(tools: list[dict[str, Any]]) -> None:
        for tool in tools:
            of = tool.get("function", tool)
            add(tool.get("tools", []))  # a namespace
            if schema := of.get("input_schema") or of.get("parameters"):
                found[of["name"]] = schema

    for data in sent:
        for part in data.split(b"\r\n\r\n"):
            if part.startswith(b"{"):
                body, _ = json.JSONDecoder().raw_decode(part.decode(errors="replace"))
                add(body.get("tools") or [])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("work")
    (made / "note.txt").write_text(f"The password is {SECRET}.\n")
    return made


@pytest.fixture(scope="module")
def report(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, engine_forks: EngineForks | None
) -> Iterator[dict[str, Any]]:
    scripts: dict[str, Any] = {"": "Hello!", SECRET: SAYS}
    for name, agent in AGENTS.items():
        arguments = {key: value.format(folder=folder) for key, value in agent.arguments.items()}
        call = json.dumps({"name": agent.tool, "arguments": arguments})
        scripts[f"with {name}"] = f"<tool_call>\n{call}\n</tool_call>"
    model = write_scripted_model(tmp_path_factory.mktemp("scripted"), scripts)
    flags = ("--context=64k", "--gpu=none", "--served-model-name=scripted")
    with serving(model, *flags, forks=engine_forks) as (_, loaded):
        yield loaded


@pytest.mark.seldom
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
    with recorded(report["port"]) as (port, sent):
        done = subprocess.run(
            programs.proa("launch", name, f"--port={port}", "--", *agent.words, asked),
            cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS in done.stdout
    schemas = schemas_of(sent)
    assert len(schemas) >= agent.least_tools
    tree = LLTokenizer("byte")
    refused = {tool: verdict(Constraint.json(schema), tree).message for tool, schema in schemas.items()}
    assert not any(refused.values()), refused
