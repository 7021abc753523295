"""`proa serve`: parses options and starts a server."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.config.env import read_env
from proa.config.field import argument, option
from proa.config.options import MODEL_HELP, ServeOptions
from proa.config.parse import given_options, parse

SUMMARY = "load a model and serve it over HTTP"
EPILOG = """\
The port opens as soon as the model's headers are read; /health reports the loading progress. Ctrl-C or SIGTERM lets
running requests finish, then stops the server.
Clients of OpenAI (/v1/chat/completions, /v1/completions, /v1/responses), Anthropic (/v1/messages) and Ollama (/api)
work unchanged, with tool calls, reasoning and structured output; docs/api.md has the fields of each.
`proa launch claude` (codex, opencode) starts a coding agent on this server; docs/agents.md has the settings of others.
See also: `proa models` lists model names; docs/options.md has every option and its default."""


@dataclass(frozen=True)
class ServeCommand:
    """options"""

    model: str = argument(help=MODEL_HELP, metavar="MODEL")
    serve: ServeOptions = field(default_factory=ServeOptions)
    json: bool = option(False, help="print the start-up report as JSON lines on stdout: planned, then loaded")
    until_stdin_closes: bool = option(False, help="exit when stdin closes, for programs that start a server")


def run(argv: Sequence[str]) -> int:
    parsed = parse(ServeCommand, argv, prog="proa serve", summary=SUMMARY, epilog=EPILOG)
    command = parsed.options
    # Imports in this order: FastAPI takes a second, and the engine's process imports torch meanwhile.
    from proa.cli.begin import begin

    with begin(command.model, command.serve) as begun:
        from proa.cli.start import serve_model
        from proa.obs.console import console_err
        from proa.obs.log import setup_logging

        console = console_err()
        setup_logging(read_env().log, console)
        if command.until_stdin_closes:
            threading.Thread(target=_stop_when_stdin_closes, daemon=True, name="stdin").start()
        options = given_options(command.serve, parsed.sources)
        return serve_model(command.model, begun, command.serve, options, console, json=command.json)


def _stop_when_stdin_closes() -> None:
    # Not sys.stdin.read: this thread would hold its lock, which blocks the interpreter's shutdown.
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
