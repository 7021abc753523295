"""What the user typed -> a path on this machine, fetched if need be. Belongs here: who fetches what. Never: HTTP, names
(lookup.py)."""

from __future__ import annotations

from pathlib import Path

from proa.config.env import read_env
from proa.demo.assemble import assemble
from proa.demo.source import fetch_gguf
from proa.hub.download import Check, Progress, check_loadable, download, download_config
from proa.hub.lookup import look_up


def locate(
    model: str,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    check: Check = check_loadable,
    config_only: bool = False,
) -> Path:
    """The folder or GGUF file of the model that `look_up` finds.

    `check` judges a hub model on its headers, before its weights are fetched. config_only: leave the weights of a
    hub model where they are. Raises ModelNotFound, UsageError, HubError, ResourceError and what `check` raises.
    """
    wanted = look_up(model, revision, config_only=config_only)
    if wanted.path:
        return wanted.path
    if wanted.reference is None:
        return _demo(model, progress)
    return download_config(wanted.reference) if config_only else download(wanted.reference, progress, check)


def demo_folder() -> Path:
    """Where the demo is kept."""
    return read_env().cache / "demo"


def _demo(model: str, progress: Progress | None) -> Path:
    gguf = fetch_gguf(demo_folder(), progress)
    return gguf if model == "demo-dense" else assemble(gguf, demo_folder() / "smollm2-moe", progress=progress)
