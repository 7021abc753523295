"""What the user typed -> a path on this machine, fetched if need be. Belongs here: who fetches what. Never: HTTP, names
(lookup.py).

What makes the demo and what talks to the hub is imported when it is needed: HTTP clients and NumPy take half a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from proa.config.env import read_env
from proa.demo.made import is_made, stamp_of
from proa.demo.source import fetch_gguf
from proa.hub.lookup import look_up

Progress = Callable[[str, int, int], None]
Check = Callable[[Path, str], object]  # see hub/download.py


def locate(
    model: str,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    check: Check | None = None,
    config_only: bool = False,
) -> Path:
    """The folder or GGUF file of the model that `look_up` finds.

    `check` judges a hub model on its headers, before its weights are fetched; None: check_loadable. config_only: leave
    the weights of a hub model where they are. Raises ModelNotFound, UsageError, HubError, ResourceError and what
    `check` raises.
    """
    wanted = look_up(model, revision, config_only=config_only)
    if wanted.path:
        return wanted.path
    if wanted.reference is None:
        return _demo(model, progress)
    from_hub = importlib.import_module("proa.hub.download")
    found: Path = from_hub.download_config(wanted.reference) if config_only else from_hub.download(
        wanted.reference, progress, check or from_hub.check_loadable
    )  # fmt: skip
    return found


def demo_folder() -> Path:
    """Where the demo is kept."""
    return read_env().cache / "demo"


def _demo(model: str, progress: Progress | None) -> Path:
    gguf = fetch_gguf(demo_folder(), progress)
    folder = demo_folder() / "smollm2-moe"
    if model == "demo-dense":
        return gguf
    if is_made(folder, stamp_of(gguf)):
        return folder
    made: Path = importlib.import_module("proa.demo.assemble").assemble(gguf, folder, progress=progress)
    return made
