"""Loads a subcommand's module, which has `run(argv) -> exit code`, when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from proa.config.parse import HelpShown


def load_command(module: str) -> Callable[[Sequence[str]], int]:
    """Import a subcommand's module and return its `run`."""
    return cast(Callable[[Sequence[str]], int], importlib.import_module(module).run)


def full_help(module: str) -> str:
    """Return the text that the command prints for --help-all."""
    try:
        load_command(module)(["--help-all"])
    except HelpShown as help_shown:
        return help_shown.text
    raise RuntimeError(f"{module} shows no help for --help-all")
