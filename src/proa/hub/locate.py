"""What the user typed -> a path on this machine. Belongs here: the order in which names are looked up. Never: HTTP.

An existing local path comes first and never touches the network. Then the demo, the aliases, hub ids.
A model that is completely in the cache is used as it is, without asking the hub for a newer one.
"""

from __future__ import annotations

import re
from pathlib import Path

from proa.config.env import read_env
from proa.config.suggest import did_you_mean
from proa.demo.assemble import assemble
from proa.demo.source import fetch_gguf
from proa.errors import ModelNotFound, UsageError
from proa.hub.aliases import load_aliases
from proa.hub.cache import RepoCache
from proa.hub.download import Check, Progress, check_loadable, download, download_config
from proa.hub.reference import parse_reference

DEMO_NAMES = ("demo", "demo-dense")

_WRITTEN_AS_PATH = re.compile(r"[./~].*|.*/|.*/.*/.*|.*\.gguf", re.DOTALL)


def locate(
    model: str,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    check: Check = check_loadable,
    config_only: bool = False,
) -> Path:
    """The model's folder or GGUF file. `model`: a path, "demo", "demo-dense", an alias, or org/name[@revision][:file].

    `check` judges a hub model on its headers, before its weights are fetched. config_only: leave the weights of a
    hub model where they are. Raises ModelNotFound, UsageError, HubError, ResourceError and what `check` raises.
    """
    local = _local(model)
    if (local or model in DEMO_NAMES) and revision is not None:
        raise UsageError(f"{model} is not on the hub, so --revision {revision} has no meaning.", "Leave it out.")
    if local:
        return local
    if model in DEMO_NAMES:
        return _demo(model, progress)
    alias = load_aliases().get(model)
    reference = alias.reference if alias else parse_reference(model)
    if reference is None:
        raise _not_found(model)
    reference = reference.at(revision)
    if found := RepoCache(reference.repo).find(reference, config_only):
        return found
    return download_config(reference) if config_only else download(reference, progress, check)


def demo_folder() -> Path:
    """Where the demo is kept."""
    return read_env().cache / "demo"


def _demo(model: str, progress: Progress | None) -> Path:
    gguf = fetch_gguf(demo_folder(), progress)
    return gguf if model == "demo-dense" else assemble(gguf, demo_folder() / "smollm2-moe", progress=progress)


def _local(model: str) -> Path | None:
    """The path if `model` is one. A bare name counts only if the folder holds a model: ./demo/ may be anything."""
    if not model.strip() or "\0" in model:
        raise UsageError(f"The model's name is {model!r}.", "Give a folder, a .gguf file, a hub id or an alias.")
    path = Path(model).expanduser()
    reference = parse_reference(model)
    names_part_of_repo = reference is not None and model != reference.repo  # org/name:folder/file.gguf
    written_as_path = _WRITTEN_AS_PATH.fullmatch(model) is not None and not names_part_of_repo
    if path.is_file():
        if path.suffix == ".gguf":
            return path.absolute()
        raise UsageError(f"{path} is a file, but no .gguf.", f"Give the model's folder: {path.absolute().parent}.")
    if path.is_dir() and (written_as_path or "/" in model or _holds_model(path)):
        return path.absolute()
    if written_as_path:
        raise _not_found(model)
    return None


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _not_found(model: str) -> ModelNotFound:
    path = Path(model).expanduser().absolute()
    hint = did_you_mean(path.name, [*_models_in(path.parent), *load_aliases(), *DEMO_NAMES])
    return ModelNotFound(
        f"There is no model {model}: no such folder or .gguf file, and no such alias.",
        f"{hint} Give a path, a hub id (org/name), or one of the names that `proa models` lists.".strip(),
    )


def _models_in(folder: Path) -> list[str]:
    try:
        return [p.name for p in folder.iterdir() if p.suffix == ".gguf" or (p.is_dir() and _holds_model(p))]
    except OSError:  # only a hint is lost
        return []
