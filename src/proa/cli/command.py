"""A command behind its name: a module with `run(argv)`, imported when it is needed. Never: which ones there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from proa.config.parse import HelpShown


def load(module: str) -> Callable[[Sequence[str]], int]:
    return cast(Callable[[Sequence[str]], int], importlib.import_module(module).run)


def full_help(module: str) -> str:
    """What the command shows for --help-all."""
    try:
        load(module)(["--help-all"])
    except HelpShown as help_shown:
        return help_shown.text
    raise RuntimeError(f"{module} shows no help for --help-all")
