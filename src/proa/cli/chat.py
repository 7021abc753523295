"""`proa chat`: connects to a running server, or starts one, and runs a chat session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from proa.config.field import argument, option
from proa.config.options import EngineOptions
from proa.config.parse import parse
from proa.errors import UsageError

SUMMARY = "chat with a model in the terminal"
EPILOG = """\
If no engine options are given and a server on --host and --port serves MODEL (or MODEL is not given), that server is
used. Otherwise a server is started on a free port, and stopped at the end.
Piped text is the prompt: `proa chat < question.txt`."""


@dataclass(frozen=True)
class ChatOptions:
    """options"""

    model: str | None = argument(None, help="the model, as for `proa serve`; default: demo", metavar="MODEL")
    prompt: str | None = option(
        None,
        help="send this prompt, print only the answer, and exit; - reads stdin",
        metavar="TEXT",
        short="p",
        common=True,
    )
    system: str | None = option(None, help="system message", metavar="TEXT", common=True)
    set: tuple[str, ...] = option(
        (), help="sampling setting, such as temperature=0 (repeatable)", metavar="KEY=VALUE", common=True
    )
    host: str = option("127.0.0.1", help="address of a running server", metavar="ADDR", common=True)
    port: int = option(8000, help="port of a running server", low=1, high=65535, common=True)
    api_key: str | None = option(None, help="API key of the running server", metavar="KEY", secret=True)
    engine: EngineOptions = field(default_factory=EngineOptions)


def run(argv: Sequence[str]) -> int:
    options = parse(ChatOptions, argv, prog="proa chat", summary=SUMMARY, epilog=EPILOG).options
    # httpx and rich take 0.2 s to import, and --help does not need them.
    from proa.cli.chat_session import Session
    from proa.cli.running import Wanted, running_or_started
    from proa.obs.console import console_err

    settings = _settings(options.set)
    prompt = _prompt(options.prompt)
    notes = console_err()
    wanted = Wanted(options.model, options.host, options.port, options.api_key, options.engine)
    with running_or_started(wanted, notes) as (client, served):
        session = Session(client, served, options.system, settings, notes)
        if prompt is not None:
            session.ask(prompt)
            return 0
        notes.print(f"Talking to {served.name}. /help lists the commands; Ctrl-D exits.", markup=False)
        session.repl(_line_reader())
    return 0


def _settings(pairs: Sequence[str]) -> dict[str, object]:
    from proa.cli.chat_session import parse_setting

    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set is {pair!r}, without '='.", "Give KEY=VALUE, such as --set temperature=0.")
        settings[key] = parse_setting(key, value)
    return settings


def _prompt(given: str | None) -> str | None:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input cannot be read: {error}.", "Send UTF-8 text.") from error
    if not text:
        raise UsageError("There is no prompt: standard input is empty.", "Give a prompt with -p TEXT.")
    return text


def _line_reader() -> Callable[[], str]:
    import readline  # noqa: F401 - the import itself gives input() line editing and history

    def read() -> str:
        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")  # ends the line of the prompt, where the shell goes on
            raise

    return read
