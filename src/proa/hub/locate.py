"""Resolves a model name to a local path, downloading or building the model if necessary.

The demo builder and the hub client are imported on demand: NumPy and HTTP clients take half a second to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from proa.config.env import read_env
from proa.demo.made import is_made, stamp_of
from proa.demo.source import GGUF_NAME, fetch_gguf, is_complete
from proa.hub.lookup import look_up
from proa.types import ProgressCallback

# Checks a model before its weights are fetched: (path of its headers, load_format to open it with). Raises ProaError.
Check = Callable[[Path, str], object]

MOE_FOLDER = "smollm2-moe"  # of the built demo, in `demo_folder`


def locate(
    model: str,
    revision: str | None = None,
    progress: ProgressCallback | None = None,
    *,
    check: Check | None = None,
    config_only: bool = False,
) -> Path:
    """Return the folder or GGUF file of a model (names: see `look_up`), downloading it first if it is not here.

    check: runs on a hub model's headers before its weights are downloaded; None: check_loadable. config_only: do not
    download the weights of a hub model. Raises ModelNotFound, UsageError, HubError, ResourceError, and what `check`
    raises.
    """
    wanted = look_up(model, revision, config_only=config_only)
    if wanted.path:
        return wanted.path
    if wanted.reference is None:
        return _demo(model, progress)
    from_hub = importlib.import_module("proa.hub.download")
    reference = wanted.reference
    found: Path = from_hub.download_config(reference) if config_only else from_hub.download(reference, progress, check)
    return found


def locate_here(model: str, revision: str | None = None, *, config_only: bool = False) -> Path | None:
    """Return the path of a model if nothing has to be downloaded or built; None otherwise. Raises what look_up raises,
    and UsageError if the demo's folder is not Proa's."""
    wanted = look_up(model, revision, config_only=config_only)
    if wanted.path or wanted.reference:
        return wanted.path
    gguf, folder = demo_folder() / GGUF_NAME, demo_folder() / MOE_FOLDER
    if not is_complete(gguf):
        return None
    if model == "demo-dense":
        return gguf
    return folder if is_made(folder, stamp_of(gguf)) else None


def demo_folder() -> Path:
    """Return the cache folder of the demo model; it may not exist yet."""
    return read_env().cache / "demo"


def _demo(model: str, progress: ProgressCallback | None) -> Path:
    gguf = fetch_gguf(demo_folder(), progress)
    folder = demo_folder() / MOE_FOLDER
    if model == "demo-dense":
        return gguf
    if is_made(folder, stamp_of(gguf)):
        return folder
    made: Path = importlib.import_module("proa.demo.assemble").assemble(gguf, folder, progress=progress)
    return made
