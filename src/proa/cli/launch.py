"""`proa launch`: starts a coding agent that uses a model served here, and a server if none runs.

The agent's own settings stay untouched: it is configured by environment variables, flags or a temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from proa.config.field import argument, option
from proa.config.options import EngineOptions
from proa.config.parse import parse
from proa.errors import UsageError

SUMMARY = "start a coding agent (claude, codex, opencode) on a local model"
EPILOG = """\
The agent must be installed; words after -- are passed to it: `proa launch claude demo -- -p "What is here?"`.
A running server on --host and --port is used as by `proa chat`; else one is started, and stopped at the end.
docs/agents.md has the settings of these and other agents."""


@dataclass(frozen=True)
class LaunchOptions:
    """options"""

    agent: str = argument(help="claude, codex or opencode", metavar="AGENT")
    model: str | None = argument(None, help="the model, as for `proa serve`; default: demo", metavar="MODEL")
    host: str = option("127.0.0.1", help="address of a running server", metavar="ADDR", common=True)
    port: int = option(8000, help="port of a running server", low=1, high=65535, common=True)
    api_key: str | None = option(None, help="API key of the running server", metavar="KEY", secret=True)
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class Start:
    """How an agent is started: words after its name, and variables of its environment."""

    flags: tuple[str, ...]
    environ: dict[str, str]


def claude(url: str, model: str, key: str, context_tokens: int, folder: Path) -> Start:
    """Claude Code: by environment. Every kind of task uses the one model."""
    names = (
        *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
        *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")),
    )
    return Start(
        (),
        {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_API_KEY": "",
            **dict.fromkeys(names, model),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(context_tokens // 4, 1024)),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each request, and with it the cached prefix
        },
    )


def codex(url: str, model: str, key: str, context_tokens: int, folder: Path) -> Start:
    """Codex: by flags that override its config."""
    settings = {
        "model": model,
        "model_provider": "proa",
        "model_context_window": context_tokens,
        "model_providers.proa.name": "Proa",
        "model_providers.proa.base_url": f"{url}/v1",
        "model_providers.proa.env_key": "LOCAL_API_KEY",
        "model_providers.proa.wire_api": "responses",
    }
    flags = (word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}"))
    return Start(tuple(flags), {"LOCAL_API_KEY": key})


def opencode(url: str, model: str, key: str, context_tokens: int, folder: Path) -> Start:
    """opencode: by a config file in a temporary folder, which is merged with the user's."""
    limit = {"context": context_tokens, "output": max(context_tokens // 4, 1024)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Proa",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"name": model, "limit": limit}},
    }
    name = f"proa/{model}"
    config = {"$schema": "https://opencode.ai/config.json", "provider": {"proa": provider}, "model": name}
    path = folder / "opencode.json"
    path.write_text(json.dumps({**config, "small_model": name}), encoding="utf-8")
    return Start((), {"OPENCODE_CONFIG": str(path)})


AGENTS: dict[str, Callable[[str, str, str, int, Path], Start]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
}
_INSTALL = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai"}


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = parse(LaunchOptions, words[:cut], prog="proa launch", summary=SUMMARY, epilog=EPILOG).options
    program = _program(options.agent)
    with _settings(options) as start:
        command = [program, *start.flags, *words[cut + 1 :]]
        return _run_agent(command, {**os.environ, **start.environ})


def _run_agent(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the agent and return its exit code. A signal that would end this program goes to the agent, because server
    and settings are needed until it has ended; Ctrl-C reaches it from the terminal."""
    with subprocess.Popen(command, env=environ) as agent:

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGINT:
                agent.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup: no SIGHUP
        before = {number: signal.signal(number, forward) for number in heard}
        try:
            code = agent.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as shells report a signal


def _program(agent: str) -> str:
    """Return the agent's path. Raises UsageError if it is unknown or not installed."""
    if agent not in AGENTS:
        raise UsageError(f"There is no agent {agent}.", f"The agents are {', '.join(AGENTS)}.")
    program = shutil.which(agent)
    if program is None:
        raise UsageError(f"{agent} is not installed.", f"Install it: npm install -g {_INSTALL[agent]}")
    return program


@contextmanager
def _settings(options: LaunchOptions) -> Iterator[Start]:
    """Find or start a server until the block ends; yield how the agent is started."""
    from proa.cli.running import Wanted, running_or_started
    from proa.obs.console import console_err

    wanted = Wanted(options.model, options.host, options.port, options.api_key, options.engine)
    with ExitStack() as stack:
        client, served = stack.enter_context(running_or_started(wanted, console_err()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proa-launch-")))
        key = options.api_key or "none"
        yield AGENTS[options.agent](client.url, served.name, key, served.context_tokens, folder)
