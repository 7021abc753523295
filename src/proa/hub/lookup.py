"""What the user typed -> a path on this machine, if the model is here. Belongs here: the order in which names are
looked up. Never: the network, HTTP libraries (a wrong name is refused before they are imported).

An existing local path comes first. Then the demo, the aliases, hub ids. A model that is completely in the cache is used
as it is, without asking the hub for a newer one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from proa.config.suggest import did_you_mean
from proa.errors import ModelNotFound, UsageError
from proa.hub.aliases import load_aliases
from proa.hub.cache import RepoCache
from proa.hub.reference import HubReference, parse_reference

DEMO_NAMES = ("demo", "demo-dense")

_WRITTEN_AS_PATH = re.compile(r"[./~].*|.*/|.*/.*/.*|.*\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Wanted:
    """A model by name. path: where it is on this machine, None if it must be fetched: from the hub by `reference`, or
    made where that is None (the demo)."""

    path: Path | None
    reference: HubReference | None = None


def look_up(model: str, revision: str | None = None, *, config_only: bool = False) -> Wanted:
    """`model`: a path, "demo", "demo-dense", an alias, or org/name[@revision][:file].

    config_only: the weights of a hub model need not be here. Raises ModelNotFound and UsageError.
    """
    local = _local(model)
    if (local or model in DEMO_NAMES) and revision is not None:
        raise UsageError(f"{model} is not on the hub, so --revision {revision} has no meaning.", "Leave it out.")
    if local or model in DEMO_NAMES:
        return Wanted(local)
    alias = load_aliases().get(model)
    reference = alias.reference if alias else parse_reference(model)
    if reference is None:
        raise _not_found(model)
    reference = reference.at(revision)
    return Wanted(RepoCache(reference.repo).find(reference, config_only), reference)


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
