"""The `proa` program: dispatches to subcommands, and turns errors into messages and exit codes.

Each subcommand is a module with `run(argv) -> exit code`, imported only when it is called, so that `proa --help` is
fast.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from proa.cli.command import full_help, load_command
from proa.config.bytecode import keep_bytecode
from proa.config.env import read_env
from proa.config.parse import HelpShown
from proa.config.suggest import did_you_mean
from proa.errors import ProaError, ResourceError, UsageError
from proa.obs.console import write_err, write_out
from proa.obs.version import proa_version


@dataclass(frozen=True)
class Command:
    """A subcommand: its module, and its line in `proa --help`."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("proa.cli.serve", "load a model and serve it over HTTP"),
    "plan": Command("proa.cli.plan", "plan a model for this machine or another, and predict its speed"),
    "chat": Command("proa.cli.chat", "chat with a model in the terminal"),
    "launch": Command("proa.cli.launch", "start a coding agent on a local model"),
    "bench": Command("proa.cli.bench", "measure latency, throughput or kernels against hardware limits"),
    "check": Command("proa.cli.check", "compare a model on every path of this machine with the reference"),
    "warm": Command("proa.cli.warm", "compile a model's GPU kernels before its first start"),
    "models": Command("proa.cli.models", "list models by short name, with sizes"),
    "doctor": Command("proa.cli.doctor", "check this machine and suggest remedies for problems"),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
# Commands with temporary folders, which they remove on SIGTERM and SIGHUP too.
_WITH_FOLDERS = ("bench", "check", "launch")


def main() -> int:
    """Entry point of the `proa` script: run the command line, print errors, return the exit code."""
    _open_closed_streams()
    try:
        return _run_or_help(sys.argv[1:])
    except ProaError as error:
        if _debug():
            traceback.print_exc()
        write_err(f"proa: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except Exception as error:  # noqa: BLE001 - top level: print one line instead of a traceback
        if _debug():
            traceback.print_exc()
        if isinstance(error, PermissionError) and error.filename is not None:
            write_err(f"proa: {error.filename} cannot be used: permission denied. {_OTHER_FOLDER}\n")
            return UsageError.exit_code
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for {error.filename}" if error.filename is not None else ""
            write_err(f"proa: No space is left on the disk{where}. Free some, or choose another disk.\n")
            return ResourceError.exit_code
        what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:")
        write_err(f"proa: unexpected error: {what}. Set PROA_LOG=debug for the traceback, and report it.\n")
        return 1
    finally:
        gc.freeze()  # the garbage collection at exit would scan all modules for 0.15 s


_OTHER_FOLDER = "Give this user access to it, or use another folder: PROA_CACHE and HF_HOME move the caches."


def _run_or_help(argv: Sequence[str]) -> int:
    try:
        return run(argv)
    except HelpShown as help_shown:
        return _write(help_shown.text)


def run(argv: Sequence[str]) -> int:
    """Run `proa ARGV...`. Raises ProaError, HelpShown."""
    word = argv[0] if argv else "--help"
    if word in ("-h", "--help", "help"):
        return _write(overview())
    if word == "--help-all":
        return _write("\n\n".join([overview(), *(full_help(command.module) for command in COMMANDS.values())]))
    if word == "--version":
        return _write(f"proa {proa_version()}\n")
    if word not in COMMANDS:
        kind = "option" if word.startswith("-") else "command"
        known = [*COMMANDS, "--help", "--help-all", "--version"]
        raise UsageError(f"proa has no {kind} {word}.", f"{did_you_mean(word, known)} See `proa --help`.".strip())
    env = read_env()  # raises UsageError for a misspelt PROA_ variable before any work
    with contextlib.suppress(UsageError):  # no home folder
        keep_bytecode(env.cache)
    if word in _WITH_FOLDERS:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, _unwind)
    return load_command(COMMANDS[word].module)(argv[1:])


def overview() -> str:
    """Return the text of `proa --help`; it fits a screen of 80 x 24."""
    commands = "\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items())
    return f"""\
Proa runs Mixture-of-Experts language models across GPU and CPU memory.

usage: proa COMMAND [options]

commands:
{commands}

first steps:
  proa chat                  chat with the demo model
  proa serve demo            serve it on http://127.0.0.1:8000/v1
  proa serve ./my-model      serve a Hugging Face folder or a GGUF file

  proa COMMAND --help        the common options
  proa COMMAND --help-all    all options (proa --help-all: of every command)
  proa --version
"""


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed (`proa serve demo >&-`): Python has None in
    their place, and the next file or socket would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _write(text: str) -> int:
    write_out(text if text.endswith("\n") else f"{text}\n")
    return 0


def _debug() -> bool:
    try:
        return read_env().debug
    except ProaError:  # an invalid PROA_ variable, which is the error being printed
        return False


def _broken_pipe() -> int:
    # The reader has closed the pipe (`proa models | head`). Without this, Python's flush at exit would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
