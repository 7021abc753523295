"""`proa launch` where no server runs: it starts one for the agent, and stops it when the agent ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import programs
from scripted_model import write_scripted_model

LIMIT_S = 120
# A program under the agent's name, which asks the server of its environment and ends with an exit code of its own.
AGENT = """#!{python}
import json, os, sys, urllib.request
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 20, "messages": [{{"role": "user", "content": "Hi"}}]}}
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(),
    {{"content-type": "application/json", "authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}},
)
with urllib.request.urlopen(request) as answer:
    print(os.environ["ANTHROPIC_BASE_URL"], json.load(answer)["content"][0]["text"], *sys.argv[1:])
sys.exit(7)
"""


def test_it_starts_and_stops_a_server(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", {"": "Hello!"})
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "claude"
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    words = ("claude", str(folder), f"--port={free}", "--context=2k", "--gpu=none", "--", "-p", "now")
    done = subprocess.run(
        programs.proa("launch", *words),
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr[-2000:]
    url, *said = done.stdout.split()
    assert said == ["Hello!", "-p", "now"]
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0, "the server still runs"
